"""What pyproject.toml cannot say beside its search for packages: ``patches/`` is part of the package when installed."""

from setuptools import find_packages, setup

DATA = "odyssey_megatron.patches"

setup(
    packages=[*find_packages(include=["odyssey_megatron*"]), DATA],
    package_dir={DATA: "patches"},
    package_data={DATA: ["*.txt", "*/*.toml", "*/*.txt"]},
)
