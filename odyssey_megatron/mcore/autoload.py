"""The calls through which Odyssey enters a process that runs an unmodified (or patched) Megatron-LM script.

They do nothing unless ``--odyssey`` is among the arguments, or ODYSSEY in the environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator

from odyssey_megatron.config import OdysseyConfig, config_from_argv
from odyssey_megatron.errors import EXIT_BAD_INPUT, ConfigError, MegatronIncompatible
from odyssey_megatron.launch import shim
from odyssey_megatron.launch.rank import environment, refusing


def wanted() -> bool:
    """Whether this process was started with Odyssey, in any mode."""
    return "ODYSSEY" in os.environ or _is_flagged()


def _is_flagged() -> bool:
    return any(one == "--odyssey" or one.startswith(("--odyssey=", "--odyssey-")) for one in sys.argv)


def _config() -> OdysseyConfig | None:
    if not wanted():
        return None
    config = config_from_argv(sys.argv[1:])
    return None if config.mode == "off" else config


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn bad input in the body into one paragraph, and end the process with its exit code, whoever has called."""
    try:
        yield
    except ConfigError as error:
        refusing.say(str(error))
        raise SystemExit(EXIT_BAD_INPUT) from None


@_refusing()
def before_megatron() -> None:
    """Choose the device, before anything of Megatron is imported.

    Does not return if the launcher is not Odyssey's: this process then stands in for the rank that it was meant to be.
    """
    if config := _config():
        if shim.is_needed():
            shim.become()
        if "ODYSSEY_PARENT_PID" not in os.environ and not _is_flagged():
            return  # a tool of Megatron-LM's run in a job's environment; a job is refused when it would train
        environment.of_rank()  # first, since what follows would fail for another reason if this is no rank
        from odyssey_megatron.mcore import device

        device.install(config)


@_refusing()
def import_training() -> None:
    """Import ``megatron.training``. Raises MegatronIncompatible."""
    config = _config()
    try:
        if importlib.util.find_spec("megatron.training") is None:
            raise ModuleNotFoundError("No module named 'megatron.training'", name="megatron.training")
        if config and config.device == "cpu":
            from odyssey_megatron.mcore.cpu import device as cpu_device

            cpu_device.prepare_training()
        import megatron.training  # noqa: F401
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "megatron").startswith("megatron"):
            raise MegatronIncompatible(
                f"Megatron-LM imports {error.name}, which is not installed. What its training loop needs: pip install "
                "six regex PyYAML pydantic psutil tensorboard pybind11. 'odyssey doctor PATH' names what is missing."
            ) from error
        raise MegatronIncompatible(
            f"megatron.training cannot be imported ({error}). It is in no package: run a script of a Megatron-LM "
            "checkout, or put the checkout into PYTHONPATH. A script that trains with TrainingJob needs no --odyssey."
        ) from error


@_refusing()
def after_training() -> None:
    """Hook into ``megatron.training``, which has been imported."""
    if config := _config():
        from odyssey_megatron.mcore.loop import door, observe

        (observe if config.mode == "observe" else door).attach(config)
