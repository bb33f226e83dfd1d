"""Odyssey for Megatron: a training job that survives the loss of GPUs without a restart.

Read ``recover.py`` first: it shows the whole flow.
"""

__version__ = "0.1.0"
