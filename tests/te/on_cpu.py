"""A plugin for pytest, and a module to preload: Transformer Engine on the CPU device, offered before Megatron asks.

python -m pytest -p tests.te.on_cpu -m gpu tests/mcore/test_te_gpu.py
"""

from tests.te.offer import offer

offer()

from odyssey_megatron.mcore import cpu_device  # noqa: E402 - Megatron comes with it

cpu_device.install()
