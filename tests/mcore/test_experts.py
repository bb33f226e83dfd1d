"""What routers of experts count: each token of a microbatch once, whatever runs again."""

from __future__ import annotations

import pytest

from odyssey_megatron.plan.placing.slices import EVERYTHING

torch = pytest.importorskip("torch")

EXPERTS, TOPK, TOKENS, LAYERS = 4, 2, 16, 2


@pytest.fixture
def model(make_model):
    return make_model(
        num_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
    )


def counted(model):
    """[layer, expert], and the auxiliary loss of each layer."""
    table = model.holdings.routing.local_totals().reshape(LAYERS, -1)
    return table[:, 1:], table[:, 0]


def test_a_forward_that_runs_again_counts_once(model):
    inner = model.compute.forward(0, 0, 2, None).detach()
    model.compute.forward(0, 2, 4, inner.clone())
    tokens, losses = counted(model)
    assert tokens.sum(dim=1).tolist() == [TOKENS * TOPK] * LAYERS
    assert (losses > 0.5).all(), "about 1 where the experts are in balance"
    model.compute.forward(0, 2, 4, inner.clone())
    assert torch.equal(counted(model)[0], tokens)
    assert torch.equal(counted(model)[1], losses)
    model.compute.forward(1, 0, 2, None)
    assert counted(model)[0].sum(dim=1).tolist() == [2 * TOKENS * TOPK, TOKENS * TOPK]


def test_what_is_run_ahead_counts_once_it_is_taken_up(model):
    inner = model.compute.forward(0, 0, 2, None).detach()
    for microbatch in (0, 1):
        model.compute.forward(microbatch, 2, 4, inner.clone(), ahead=True)
    assert counted(model)[0].sum(dim=1).tolist() == [TOKENS * TOPK, 0]
    model.compute.adopt([(1, 2, 4)])
    assert counted(model)[0].sum(dim=1).tolist() == [TOKENS * TOPK, TOKENS * TOPK]


def test_an_evaluation_counts_nothing(model):
    model.begin_evaluation(0, 2)
    with torch.no_grad():
        model.compute.forward(0, 0, 2, None)
    assert not counted(model)[0].any()


def test_tokens_of_experts_without_biases_count_too(make_model):
    from megatron.core.transformer.moe.router import Router

    made = make_model(num_experts=EXPERTS, moe_router_topk=TOPK, moe_router_enable_expert_bias=False)
    routing, sent = made.holdings.routing, []
    (router,) = [one for one in made.holdings.layers[1].parts.modules() if isinstance(one, Router)]
    router.register_forward_hook(lambda module, given, chosen: sent.append(chosen[1].clone()))
    for _ in range(2):
        made.compute.forward(0, 0, 2, None)
        made.compute.forward(1, 0, 2, None)
    by_hand = [
        sum(int(one[token, expert]) for one in sent[:2] for token in range(TOKENS))
        for expert in range(EXPERTS)
    ]
    assert sum(by_hand) == 2 * TOKENS * TOPK
    assert len(sent) == 4
    routing.balance({}, routing.local_totals())
    assert routing.tokens.tolist() == [by_hand, [0.0] * EXPERTS]


def test_experts_whose_gradients_megatron_would_not_sum_are_refused(spec):
    from odyssey_megatron.errors import ConfigError
    from odyssey_megatron.mcore.model.experts import Routing

    config = spec(num_experts=EXPERTS, moe_router_topk=TOPK, moe_router_enable_expert_bias=False).config
    config.expert_tensor_parallel_size = 2
    with pytest.raises(
        ConfigError, match="expert_tensor_parallel_size 2 with tensor_model_parallel_size 1.*Set"
    ):
        Routing(config, groups=None, seeds=None)


def test_biases_move_as_megatrons(model, monkeypatch):
    """By its own function, whose sum over all ranks has been made already."""
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    model.compute.forward(0, 0, 2, None)
    tokens = counted(model)[0].to(torch.float32)
    before = torch.tensor([0.25, -0.5, 0.0, 1.0])
    (bias,) = (
        one
        for name, one in model.transfer.weights_of(1, 0, [EVERYTHING]).items()
        if name.endswith("expert_bias")
    )
    assert bias.dtype == torch.float32, "in a model of float64, and of 16 bits"
    bias.copy_(before)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *args, **kwargs: None)
    expected = get_updated_expert_bias(tokens[0], before, model.spec.config.moe_router_bias_update_rate)
    layers, routing = model.holdings.layers, model.holdings.routing
    routing.balance({1: layers[1], 0: layers[0]}, routing.local_totals())
    assert torch.equal(bias, expected)
    assert not torch.equal(bias, before)
