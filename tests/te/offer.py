"""Makes Transformer Engine importable without a GPU. Must run before Megatron is imported."""

from __future__ import annotations

import ast
import importlib.machinery
import inspect
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.te import kernels, kinds, permutation

FOLDER = Path(sys.prefix) / (Path(__file__).parent / "requirements.txt").read_text().strip()
"""Where ``tests/run.sh`` puts Transformer Engine's Python modules: apart, since all other tests go without."""
NAME = "transformer_engine"
EXTENSION = "transformer_engine_torch"
APEX = "fused_weight_gradient_mlp_cuda"
"""Apex's kernel for the weight gradients of Megatron's own layers, which the head is with Transformer Engine, too."""
_OF_TRITON_AND_ONNX = "onnx_extensions", "triton.cross_entropy", "triton.pad", "triton.permutation"
"""Modules below transformer_engine.pytorch that import packages which only a GPU, or an export, needs."""


class _Absent(types.ModuleType):
    """A module whose every name exists, and cannot be called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in on the CPU")

        return missing


class _WithoutCuda(ast.NodeTransformer):
    """Takes out the assertions that there is a GPU, and that tensors are on it."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        said = node.msg.value if isinstance(node.msg, ast.Constant) else ""
        is_about_it = isinstance(said, str) and ("needs CUDA" in said or "only supports CUDA" in said)
        return ast.copy_location(ast.Pass(), node) if is_about_it else node


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module without those assertions, and keeps no compiled copy of it."""

    def source_to_code(self, data: Any, path: Any, *, _optimize: int = -1) -> Any:  # type: ignore[override]
        return super().source_to_code(_WithoutCuda().visit(ast.parse(data)), path, _optimize=_optimize)

    def path_stats(self, path: Any) -> Any:
        raise OSError("not kept")


class _Finder(importlib.machinery.PathFinder):
    """Finds Transformer Engine's modules."""

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] != NAME:
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def _fill(module: types.ModuleType, given: types.ModuleType) -> None:
    """Give ``module`` all names of ``given``. Autograd does not see into its functions, as it does not into kernels."""
    for name, value in vars(given).items():
        if not name.startswith("_"):
            setattr(module, name, torch.no_grad()(value) if inspect.isfunction(value) else value)


def offer() -> None:
    """Import ``transformer_engine.pytorch`` on top of :mod:`tests.te.kernels`; a second call does nothing."""
    if EXTENSION in sys.modules:
        return
    sys.path.insert(0, str(FOLDER))
    sys.meta_path.insert(0, _Finder)
    below = f"{NAME}.pytorch."
    sys.modules[f"{below}triton"] = types.ModuleType(f"{below}triton")
    for name in _OF_TRITON_AND_ONNX:
        sys.modules[below + name] = _Absent(below + name)
    _fill(sys.modules[f"{below}triton.permutation"], permutation)
    apex = sys.modules[APEX] = types.ModuleType(APEX)
    apex.wgrad_gemm_accum_fp32 = apex.wgrad_gemm_accum_fp16 = kernels.wgrad_gemm_accum  # type: ignore[attr-defined]
    extension = sys.modules[EXTENSION] = _Absent(EXTENSION)
    _fill(extension, kinds)
    _fill(extension, kernels)
    without = {
        "NVTE_PROJECT_BUILDING": "1",  # load neither cuDNN nor a library
        "NVTE_FRAMEWORK": "none",  # nor look for the extension
        "NVTE_TORCH_COMPILE": "0",
    }
    os.environ.update(without)
    from transformer_engine import common

    for name in without:
        del os.environ[name]
    common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch.constants as constants

    constants.TE_DType[torch.float64] = kinds.DType.kFloat64
