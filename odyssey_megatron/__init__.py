"""Odyssey for Megatron: a training job that survives the loss of GPUs without a restart.

Read ``recover.py`` first: it holds the whole flow on one screen.
"""

__version__ = "0.1.0"
