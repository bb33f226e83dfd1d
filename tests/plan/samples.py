"""Costs with round numbers and a few layouts, for the tests of the pure packages."""

from dataclasses import replace
from random import Random

from odyssey_megatron.plan.checking.simulate import run_clock
from odyssey_megatron.plan.costs import Costs, LayerCost
from odyssey_megatron.plan.schedule import Schedule
from odyssey_megatron.plan.scheduling.eager import fill_bubbles
from odyssey_megatron.plan.scheduling.generate import build_schedule
from odyssey_megatron.plan.scheduling.visits import Visits
from odyssey_megatron.policy.costs.profile import Profile
from odyssey_megatron.policy.routes.rerouting import failover_targets
from odyssey_megatron.studies.presets import ACCELERATORS, MODELS


def layer(forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, activation_bytes=1, state_bytes=1):
    return LayerCost(
        forward_s=forward_s,
        input_grad_s=input_grad_s,
        weight_grad_s=weight_grad_s,
        activation_bytes=activation_bytes,
        weight_bytes=1,
        gradient_bytes=1,
        optimizer_bytes=2,
        state_bytes=state_bytes,
    )


FREE = LayerCost(
    forward_s=0.0,
    input_grad_s=0.0,
    weight_grad_s=0.0,
    activation_bytes=0,
    weight_bytes=0,
    gradient_bytes=0,
    optimizer_bytes=0,
    state_bytes=0,
)
"""An embedding or a head that costs nothing, neither time nor memory."""


def uniform_costs(num_layers, *, ends=False, message_s=0.0, **times):
    """``num_layers`` equal layers; with ``ends`` an embedding and a head that cost nothing come on top."""
    middle = (layer(**times),) * num_layers
    free = layer(0.0, 0.0, 0.0, 0, 0)
    return Costs(
        layers=(free, *middle, free) if ends else middle,
        message_bytes=0,
        link_latency_s=message_s,
        link_bytes_per_s=float("inf"),
    )


def preset_profile(model: str, accelerator: str, **sizes: int) -> Profile:
    """The estimated profile of a named model on a named accelerator."""
    return MODELS[model].profile(ACCELERATORS[accelerator], **sizes)


def eager_schedule(layout, costs, *, room=None):
    """The schedule of ``layout`` with its bubbles filled, and what was put into them."""
    visits = Visits(layout)
    programs = visits.encode(build_schedule(layout, costs))
    timeline = run_clock(visits, programs, costs, {})
    filled = fill_bubbles(
        programs, visits, timeline, failover_targets(layout, costs), costs, room=room, speeds={}
    )
    schedule = Schedule(programs=tuple((w, visits.decode(codes)) for w, codes in filled.programs.items()))
    return schedule, filled


def measured(costs, seed=0, *, message_s=0.0):
    """As a job has them: each layer's times up to 0.3 % off, by chance, so that hardly two are equal."""
    rng, kinds = Random(seed), ("forward_s", "input_grad_s", "weight_grad_s")
    layers = (
        replace(one, **{kind: getattr(one, kind) * rng.uniform(0.997, 1.003) for kind in kinds})
        for one in costs.layers
    )
    return replace(costs, layers=tuple(layers), link_latency_s=message_s)
