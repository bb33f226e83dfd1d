"""Randomness as a function of (seed, step, microbatch, layer), never of who runs it or what ran before (I2)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
)

INITIAL = -1
"""The "step" and "microbatch" under which weights are initialised; "steps" below it belong to evaluations."""


def derive_seed(*parts: int) -> int:
    """A 63-bit seed from integers; equal ``parts`` give equal seeds on every machine."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True, slots=True)
class LayerPart:
    """Which part of a layer a rank has; different parts draw different random numbers."""

    tensor: int = 0
    """The rank's tensor-parallel rank."""
    experts: int = 0
    """The number of the rank's part of the experts."""

    @classmethod
    def of(cls, groups: ProcessGroupCollection) -> LayerPart:
        return cls(groups.tp.rank(), groups.tp_ep.rank())


_WHOLE = LayerPart()


def initialize(seed: int, part: LayerPart = _WHOLE) -> None:
    """Create Megatron's generator states; their contents are set again for each layer."""
    model_parallel_cuda_manual_seed(seed, tp_rank=part.tensor, ep_rank=0, etp_rank=part.experts)


def set_state(seed: int, *, step: int, microbatch: int, layer: int, part: LayerPart = _WHOLE) -> None:
    """Seed the default generators (the same for all ranks of a lane) and each of Megatron's states (different for each
    part, but for that from which weights are drawn that all parts have alike).
    """
    tracker = get_cuda_rng_tracker()
    base = derive_seed(seed, step, microbatch, layer)
    of_part = {get_expert_parallel_rng_tracker_name(): part.experts, get_data_parallel_rng_tracker_name(): 0}
    states = {}
    for index, name in enumerate(sorted(tracker.get_states())):
        torch.cuda.manual_seed(derive_seed(base, index, of_part.get(name, part.tensor)))
        states[name] = torch.cuda.get_rng_state()
    tracker.set_states(states)
    _seed_default(base)


class LayerSeeds:
    """Reseeds before each layer's forward. The engine sets the (step, microbatch) at hand, also for recomputation, and
    for evaluations, in which routers may draw random numbers.
    """

    def __init__(self, seed: int, part: LayerPart = _WHOLE):
        self._seed, self._part = seed, part
        self.step, self.microbatch = INITIAL, INITIAL
        self.is_idle = False
        """Whether the microbatch is computed once more, for nothing (``lanes.py``)."""

    def in_place_of(self, experts: int) -> None:
        """Draw from now on what the rank of a whole gang does that has this part of the experts."""
        self._part = replace(self._part, experts=experts)

    def attach(self, module: torch.nn.Module, layer: int) -> None:
        """Make ``module`` draw the random numbers of ``layer`` from now on."""

        def reseed(module: torch.nn.Module, args: Any) -> None:
            set_state(self._seed, step=self.step, microbatch=self.microbatch, layer=layer, part=self._part)

        module.register_forward_pre_hook(reseed)

    def reseed_script(self) -> None:
        """Seed what the script's forward step draws from, the same on every rank that reads this microbatch."""
        _seed_default(derive_seed(self._seed, self.step, self.microbatch))


def _seed_default(seed: int) -> None:
    # Not torch.manual_seed(): it seeds every kind of device, and formats two stack traces on the way.
    torch.default_generator.manual_seed(seed)
    torch.cuda.manual_seed(seed)
