"""What the jobs of these tests import: the agent's modules and the rank's."""

# ruff: noqa: F401 - importing is all that this does
from odyssey_megatron.mcore.cpu import preload  # isort: skip - the CPU device comes before Megatron
import tests.launch.preload
