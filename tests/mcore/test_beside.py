"""Beside the rest of an input gradient run the weight gradients, and begin the sums, of the layers it has passed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.errors import Superseded  # noqa: E402


def step(model: Any, microbatches: int, on_the_way: bool) -> tuple[list[int], Any, list[Any]]:
    """A worker's end of a step: of the last microbatch the layers that were passed, and what was summed by then."""
    last = model.spec.num_layers
    model.begin_step(0)
    for microbatch in range(microbatches):
        model.compute.forward(microbatch, 0, last, None)
    passed, summed = list[int](), list[Any]()
    left = list(reversed(range(last)))

    def run_on(layer: int) -> None:
        passed.append(layer)
        while left and layer <= left[0]:
            one = left.pop(0)
            for microbatch in range(microbatches):
                model.compute.weight_grad(microbatch, one, one + 1)
            summed.append(
                [one.clone() for one in model.sums.summands(one, one + 1, 0, spread=False).gradients]
            )

    for microbatch in range(microbatches - 1):
        model.compute.input_grad(microbatch, 0, last, None)
    model.compute.input_grad(microbatches - 1, 0, last, None, passed=run_on if on_the_way else None)
    begun = len(summed)
    run_on(0)
    return passed[:-1], begun, summed


RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "plain": {},
    "recomputed": {"config": RECOMPUTED},
    "recomputed in pairs": {"config": RECOMPUTED | {"recompute_num_layers": 2}},
    "with dropout": {"config": RECOMPUTED, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "experts": {"num_experts": 4, "moe_router_topk": 2, "moe_router_enable_expert_bias": False},
    "multi-token": {"mtp_num_layers": 1},
    "tied": {"share_embeddings_and_output_weights": True},
}


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_gradients_that_are_summed_on_the_way_are_whole(make_model, megatron, monkeypatch, changes):
    from megatron.core import parallel_state

    from odyssey_megatron.mcore.model import groups

    # Which multi-token prediction names with what it logs.
    for name in groups._FORBIDDEN:
        monkeypatch.setattr(parallel_state, name, megatron.dp_cp)
    model = make_model(alone=True, num_layers=4, **changes)
    _, _, expected = step(model, 2, on_the_way=False)
    passed, begun, summed = step(model, 2, on_the_way=True)
    assert passed == sorted(passed, reverse=True)
    assert passed[0] == model.spec.num_layers
    assert begun >= 3, "all but the lowest layers"
    for ours, theirs in zip(summed, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("changes", [{}, {"config": RECOMPUTED}], ids=["plain", "recomputed"])
def test_a_failure_on_the_way_ends_the_backward(make_model, changes):
    """As it is raised there; and nothing goes on collecting."""
    model = make_model(alone=True, num_layers=4, **changes)
    _, _, expected = step(model, 2, on_the_way=True)

    def fails(layer: int) -> None:
        if layer < 4:
            raise Superseded("a newer generation exists")

    model.begin_step(0)
    model.compute.forward(0, 0, 6, None)
    with pytest.raises(Superseded, match="a newer generation exists"):
        model.compute.input_grad(0, 0, 6, None, passed=fails)
    _, _, again = step(model, 2, on_the_way=True)
    for ours, theirs in zip(again, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
