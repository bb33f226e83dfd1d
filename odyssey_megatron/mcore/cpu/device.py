"""Runs Megatron, unedited, on CPU tensors and gloo, by redirecting its ``torch.cuda`` and NCCL calls.

All redirects are on torch, none on Megatron. ``install()`` must run before anything of Megatron is imported. It cannot
provide streams (ordering bugs that need a GPU stay invisible) or meaningful absolute times.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib.util
import inspect
import logging
import os
import resource
import sys
import sysconfig
import types
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

import torch

CPU = torch.device("cpu")

_FACTORIES = (
    "tensor as_tensor empty zeros ones full rand randn randint randperm arange linspace eye empty_like zeros_like "
    "ones_like full_like rand_like randn_like empty_strided"
).split()
_NEED_TRITON = tuple(
    "megatron.core." + name
    for name in (
        "transformer.custom_layers.batch_invariant_kernels",
        "transformer.moe.paged_stash",
        "transformer.moe.ops.paged_stash",
        "inference.contexts.attention_context.triton.tensor_ops",
    )
)
"""Modules that all versions from 0.16.1 to 0.19.0 import if they have them, but that nothing on the CPU uses."""
_NEW = "new_tensor new_empty new_zeros new_ones new_full".split()


def install() -> None:
    """Install the redirects; a second call does nothing."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # forked processes have their own environment
    if getattr(torch, "_odyssey_cpu_device", False):
        return
    torch._odyssey_cpu_device = True  # type: ignore[attr-defined]
    # Megatron's jit_fuser is torch.compile, which costs minutes here and changes the arithmetic. Disabling it by its
    # own switch would leave a wrapper that formats a stack trace in every call (2.13: 15 % of a small step).
    torch.compile = _not_compiled
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_cuda()
    if importlib.util.find_spec("triton") is None:  # it takes a gigabyte, for kernels that need a GPU
        for name in _NEED_TRITON:
            sys.modules.setdefault(name, _Absent(name))
    from odyssey_megatron.mcore.cpu import hybrid  # imported late: sees redirected names

    hybrid.offer_mamba_ssm()
    _compile_helpers()
    _let_norms_be_sequence_parallel()
    _let_routers_do_without_transformer_engine()
    from odyssey_megatron.mcore.cpu import attention, collectives  # imported late: sees redirected names

    attention.install()
    collectives.install()
    # One generator stands for both devices' here, so "CPU RNG state changed" is always a false alarm.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _not_compiled(model: Any = None, **options: Any) -> Any:
    """A ``torch.compile``, with or without arguments, that leaves the function as it is."""
    return _not_compiled if model is None else model


def _on_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _redirected(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and _on_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return on_cpu


def _redirect_factories() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    for name in _NEW:
        setattr(torch.Tensor, name, _redirected(getattr(torch.Tensor, name)))


def _redirect_tensor_methods() -> None:
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _on_cuda(args[0]):
            args = (CPU, *args[1:])
        if kwargs.get("device") is not None and _on_cuda(kwargs["device"]):
            kwargs["device"] = CPU
        return original_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False) -> Any:
        if dtype is None:  # Megatron compares the name, e.g. with "torch.cuda.FloatTensor"
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original_type(self, dtype, non_blocking)

    def stays(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self

    torch.Tensor.to, torch.Tensor.type = to, type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = torch.Tensor.pin_memory = stays  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = stays  # type: ignore[method-assign]


class _Stream:
    """Everything runs in program order, so a stream has nothing to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device, self.cuda_stream, self.stream_id = CPU, 0, 0

    def nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def nothing(self, *args: Any, **kwargs: Any) -> None: ...

    record = wait = synchronize = nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        raise NotImplementedError("CUDA events do not measure time on the CPU device")


class _OneGenerator:
    """``torch.cuda.default_generators``: the CPU generator stands for every device's."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _resident_bytes(*args: Any, **kwargs: Any) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes(*args: Any, **kwargs: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(device: Any = None) -> dict[str, int]:
    """The allocator's statistics that exist for a process, too; all others are 0."""
    now = _resident_bytes()
    values = {"current": now, "peak": max(now, _peak_bytes())}  # the kernel counts the two separately
    named = {
        f"{kind}.all.{which}": value
        for kind in ("allocated_bytes", "reserved_bytes", "active_bytes")
        for which, value in values.items()
    }
    return collections.defaultdict(int, named)


def _cuda_functions() -> dict[str, Any]:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=total, multi_processor_count=1
    )
    stream = _Stream()

    def context(*args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext()

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(int(value))

    return {
        "current_device": lambda: CPU,
        "device_count": lambda: 1,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": context,
        "device": context,
        "Stream": _Stream,
        "Event": _Event,
        "default_generators": _OneGenerator(),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda device=None: torch.default_generator.get_state(),
        "set_rng_state": lambda state, device=None: torch.default_generator.set_state(state) and None,
        "_lazy_call": lambda call, **kwargs: call(),
        "memory_allocated": _resident_bytes,
        "memory_reserved": _resident_bytes,
        "max_memory_allocated": _peak_bytes,
        "max_memory_reserved": _peak_bytes,
        "memory_stats": _memory_stats,
        "device_memory_used": _resident_bytes,
        "mem_get_info": lambda device=None: (total - _resident_bytes(), total),
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (8, 0),
        "get_device_name": lambda device=None: "cpu",
        "is_current_stream_capturing": lambda: False,
    }


def _redirect_cuda() -> None:
    for name, value in _cuda_functions().items():
        setattr(torch.cuda, name, value)
        if hasattr(torch.cuda.random, name):  # Megatron uses both
            setattr(torch.cuda.random, name, value)
    for (
        name
    ) in "set_device synchronize empty_cache init _lazy_init reset_peak_memory_stats set_stream".split():
        # A function object of its own for each name: torch._dynamo refuses an object that it finds under two names.
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, lambda *args, **kwargs: None)


def _let_norms_be_sequence_parallel() -> None:
    """Mark the weights of torch's norm for sequence parallelism, as Megatron's norms for GPUs do; nothing else is
    needed, but Megatron refuses it for torch's (core_v0.16.1 core/transformer/torch_norm.py).
    """
    from odyssey_megatron.upstream import seam_table, seams

    def marked(original: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    seams.wrap(seam_table.TORCH_NORM, marked)


def _let_routers_do_without_transformer_engine() -> None:
    """Define the name of Transformer Engine's product, which routers compare with None, but which Megatron leaves
    undefined without Transformer Engine (core_v0.16.1 core/transformer/moe/moe_utils.py, line 1192; the same in
    core_v0.19.0).
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[assignment] # as Megatron itself asks


def prepare_training() -> None:
    """Prepare what ``megatron.training`` needs besides, before it is imported."""
    from odyssey_megatron.upstream import cpu_seams, seam_table, seams

    # Only the default of allow_no_cuda requires a GPU.
    original = seams.original(seam_table.INITIALIZE_MEGATRON)
    names = list(inspect.signature(original).parameters)
    defaults = list(original.__defaults__ or ())
    defaults[names.index("allow_no_cuda") - len(names)] = True
    original.__defaults__ = tuple(defaults)
    _keep_spawned_processes_small()
    from odyssey_megatron.mcore.cpu import hybrid

    hybrid.let_stacks_do_without_transformer_engine()
    if not seams.is_applied(cpu_seams.FUSED_KERNELS_LOAD):
        seams.apply(cpu_seams.FUSED_KERNELS_LOAD, lambda args: None)


def _keep_spawned_processes_small() -> None:
    """Keep processes that Megatron spawns (a manager of queues, when it saves) from importing the main script, which
    they would do without the redirects.
    """
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main_")}

    spawn.get_preparation_data = get_preparation_data


class _Absent(types.ModuleType):
    """A module of which every name is a function that returns False."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: False


def _compile_helpers() -> None:
    """Make Megatron's compilation of its dataset helpers work. It runs ``make`` when it starts. The wheel ships the
    helpers compiled, without a Makefile; a checkout's Makefile names the library for the Python of ``python3-config``,
    which in a virtual environment is another Python, or missing.
    """
    from odyssey_megatron.upstream import cpu_seams, seams

    def for_this_python(original: Any) -> None:
        before = os.environ.get("MAKEFLAGS")
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        os.environ["MAKEFLAGS"] = f"{before or ''} LIBEXT={suffix}".strip()
        try:
            original()
        finally:
            if before is None:
                del os.environ["MAKEFLAGS"]
            else:
                os.environ["MAKEFLAGS"] = before

    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        seams.wrap(cpu_seams.COMPILE_HELPERS, for_this_python)
        return
    seams.apply(cpu_seams.COMPILE_HELPERS, lambda: None)
