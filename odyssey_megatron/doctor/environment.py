"""Variables and launchers that let a job die where it could have survived."""

from __future__ import annotations

import re
from collections.abc import Iterator

from odyssey_megatron.doctor.rows import OK, PROBLEM, WARNING, CheckRow, Host, Job

_IB_TIMEOUT, _IB_RETRIES = 20, 7
"""NCCL's defaults. Source: NCCL user guide, NCCL_IB_TIMEOUT (since 2.23) and NCCL_IB_RETRY_CNT."""
_WATCHDOG_S = 480
"""torch's default of TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC. Source: torch 2.13 ProcessGroupNCCL.hpp."""

_BLACKWELL = re.compile(r"\bG?B[123]\d\d\b|Blackwell")
"""Matches the names of GPUs to which Megatron's ``get_device_arch_version() < 10`` does not apply."""


def rows(host: Host, job: Job, *, patched: bool) -> Iterator[CheckRow]:
    """Yield what the environment means for ``job``.

    Args:
        patched: The checkout has Odyssey's lines (``odyssey patch``).
    """
    yield _launcher(host, patched)
    yield _slurm(host)
    yield _gloo_interface(host)
    if job.config.device == "cpu":
        return
    yield _gpu(host)
    if job.config.uses_nccl:
        yield _error_handling(host)
        yield _monitor(host, job)
        yield _nvls(host)
        yield _ib_timeout(host, job)
        yield _launch_order(host)
    yield _max_connections(host, job)


def _row(name: str, state: str, found: str, remedy: str = "") -> CheckRow:
    return CheckRow(area="environment", name=name, state=state, found=found, remedy=remedy)


def _number(text: str) -> int | None:
    """Return the whole number that a variable holds; None if it holds something else."""
    return int(text) if re.fullmatch(r"[0-9]{1,9}", text) else None


def _launcher(host: Host, patched: bool) -> CheckRow:
    if "TORCHELASTIC_RUN_ID" not in host.environ:
        return _row("launcher", OK, "not inside of torchrun")
    if patched:
        return _row(
            "launcher", OK, "torchrun; Odyssey's lines in the checkout put stand-ins between it and the ranks"
        )
    return _row(
        "launcher", PROBLEM, "torchrun ends all ranks as soon as one dies",
        "Start the job with 'odyssey run' (it takes torchrun's arguments), or run 'odyssey patch install' first.",
    )  # fmt: skip


def _slurm(host: Host) -> CheckRow:
    name = "srun --kill-on-bad-exit"
    if "SLURM_JOB_ID" not in host.environ:
        return _row(name, OK, "not inside of a SLURM job")
    chosen = host.environ.get("SLURM_KILL_BAD_EXIT")
    if chosen == "0":
        return _row(name, OK, "SLURM_KILL_BAD_EXIT=0")
    remedy = "Use 'srun --kill-on-bad-exit=0', or export SLURM_KILL_BAD_EXIT=0."
    if chosen is None:
        return _row(
            name, WARNING, "left to the cluster: where it is on, srun ends all tasks when one fails", remedy
        )
    return _row(
        name, PROBLEM, f"SLURM_KILL_BAD_EXIT={chosen}: srun ends all tasks as soon as one fails", remedy
    )


def _gloo_interface(host: Host) -> CheckRow:
    name = "GLOO_SOCKET_IFNAME"
    nodes = _number(host.environ.get("SLURM_JOB_NUM_NODES", "")) or 1
    chosen = [one for one in host.environ.get(name, "").split(",") if one]
    remedy = f"Set it to the interface that the nodes share; here there are {', '.join(host.interfaces)}."
    if unknown := [one for one in chosen if one not in host.interfaces]:
        return _row(name, PROBLEM, f"{', '.join(unknown)} is no interface of this machine", remedy)
    if nodes > 1 and "lo" in chosen:
        return _row(name, PROBLEM, f"lo reaches this machine only, and the job has {nodes} nodes", remedy)
    if nodes > 1 and not chosen:
        return _row(name, WARNING, "unset: gloo takes the interface that the host's name resolves to", remedy)
    return _row(name, OK, ",".join(chosen) or "unset, on one node")


def _gpu(host: Host) -> CheckRow:
    if host.has_gpu:
        return _row("GPU", OK, "NVIDIA driver loaded")
    return _row(
        "GPU", PROBLEM, "no NVIDIA driver on this machine",
        "Run the doctor on a node of the job; without GPUs, try the job with --odyssey-device cpu.",
    )  # fmt: skip


def _error_handling(host: Host) -> CheckRow:
    names = (
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_ASYNC_ERROR_HANDLING",
    )  # torch reads the first that is set
    name = next((one for one in names if one in host.environ), names[0])
    value = host.environ.get(name)
    if value is None:
        return _row(name, OK, "unset: 'odyssey run' sets 0")
    if value in ("0", "2"):  # the other values tear the process down. Source: torch 2.13 ProcessGroupNCCL.hpp
        return _row(name, OK, value)
    return _row(
        name, PROBLEM, f"{value}: torch's watchdog ends each survivor when a peer is gone (1 is torchrun's default)",
        f"export {names[0]}=0",
    )  # fmt: skip


def _monitor(host: Host, job: Job) -> CheckRow:
    name = "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"
    if host.environ.get("TORCH_NCCL_ENABLE_MONITORING", "0").lower() in ("0", "n", "no", "false", "off"):
        return _row("TORCH_NCCL_ENABLE_MONITORING", OK, "off")
    value = host.environ.get(name, str(_WATCHDOG_S))
    needed_s = job.config.op_timeout_s + job.config.recovery_timeout_s
    if (_number(value) or 0) > needed_s:
        return _row(name, OK, f"{value} s" + ("" if name in host.environ else ", torch's default"))
    return _row(
        name, PROBLEM, f"{value}: the watchdog's monitor would end a survivor within a recovery of {needed_s:.0f} s",
        f"export TORCH_NCCL_ENABLE_MONITORING=0, or unset {name} ({_WATCHDOG_S} s).",
    )  # fmt: skip


def _nvls(host: Host) -> CheckRow:
    name = "NCCL_NVLS_ENABLE"  # 'odyssey run' sets 0
    why = "communicators with NVLink SHARP are known to hang when aborted"
    return _off(host, name, why, f"unset {name}")


def _launch_order(host: Host) -> CheckRow:
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    why = "below CUDA 12.3 one kernel runs at a time, and pipelines of three stages would hang"
    return _off(host, name, why, f"unset {name}; docs/devices.md has the reason.")


def _off(host: Host, name: str, why: str, remedy: str) -> CheckRow:
    """Return the row of a variable that should be 0, as it is by default."""
    value = host.environ.get(name) or "0"
    return _row(name, OK, "0") if value == "0" else _row(name, WARNING, f"{value}: {why}", remedy)


def _ib_timeout(host: Host, job: Job) -> CheckRow:
    name = "NCCL_IB_TIMEOUT"
    values = [
        host.environ.get(one, str(default))
        for one, default in ((name, _IB_TIMEOUT), ("NCCL_IB_RETRY_CNT", _IB_RETRIES))
    ]
    timeout, retries = map(_number, values)
    if timeout is None or retries is None or not 1 <= timeout < 32:
        return _row(
            name, PROBLEM, f"{values[0]}, {values[1]} retries: not a number from 1 to 31", f"unset {name}"
        )
    limit_s = 4.096e-6 * 2**timeout * retries  # the InfiniBand specification's unit
    found = f"{values[0]}: a dead peer's link is given up after {limit_s:.0f} s"
    if limit_s <= job.config.op_timeout_s:
        return _row(name, OK, found)
    return _row(
        name, WARNING, f"{found}, later than --odyssey-op-timeout-s ({job.config.op_timeout_s:.0f} s)",
        f"unset {name} ({_IB_TIMEOUT}), or raise the flag.",
    )  # fmt: skip


def _max_connections(host: Host, job: Job) -> CheckRow:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    value = host.environ.get(name)
    if value == "1":
        return _row(name, OK, "1")
    if host.gpus and all(map(_BLACKWELL.search, host.gpus)):
        return _row(name, OK, f"{value or 'unset'}: Megatron does not want it on {host.gpus[0]}")
    flags = ("--tensor-model-parallel-size", "--context-parallel-size")
    parallel = [flag for flag in flags if job.value_of(flag) not in ("", "1")]
    found = f"{value or 'unset'}: before Blackwell, Megatron " + (
        f"refuses {parallel[0]} with it" if parallel else "wants 1 for tensor and context parallelism"
    )
    return _row(name, PROBLEM if parallel else WARNING, found, f"export {name}=1")
