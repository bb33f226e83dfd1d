"""Make ``python -m odyssey_megatron`` the same as the command ``odyssey``."""

from odyssey_megatron.cli import run_and_end

if __name__ == "__main__":
    run_and_end()
