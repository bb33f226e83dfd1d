"""A plugin for pytest, and a module to preload: Transformer Engine on the CPU device.

python -m pytest -p tests.te.on_cpu -m gpu tests/mcore/test_te_gpu.py
"""

import tests.te.offered  # noqa: F401 - first: Megatron comes with the device
from odyssey_megatron.mcore.cpu import device as cpu_device

cpu_device.install()
