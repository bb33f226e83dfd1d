from odyssey_megatron.studies.presets import ACCELERATORS, GIB

SHOWN_MIB = {"a100": 81_920, "h100": 81_559, "h200": 143_771, "b200": 183_359, "gb200": 189_471}
"""The memory that nvidia-smi shows."""


def test_memory_of_presets_is_that_of_the_gpus():
    for name, device in ACCELERATORS.items():
        assert 0 <= device.memory_bytes / GIB - SHOWN_MIB[name] / 1024 < 1.01, name
