"""What a training script of one's own may hand over, and what it is told otherwise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.errors import ConfigError  # noqa: E402
from odyssey_megatron.mcore.model import scripted  # noqa: E402
from odyssey_megatron.mcore.model.clipping import clipped  # noqa: E402
from tests.mcore.conftest import SCHEDULE  # noqa: E402

RATES = SimpleNamespace(lr=1e-2, min_lr=1e-3)


def stepping(model: Any, before: Any = lambda: None, report: Any = lambda loss: loss) -> None:
    """Have ``model`` call ``before`` each forward step, and ``report`` another loss than it would."""
    own_step = model.compute.forward_step

    def forward_step(iterator: Any, chunk: Any) -> Any:
        before()
        output, own_loss = own_step(iterator, chunk)

        def loss(losses: Any) -> Any:
            total, tokens, reported = own_loss(losses)
            return total, tokens, {"lm loss": report(reported["lm loss"])}

        return output, own_loss and loss

    model.compute.forward_step = forward_step


def test_what_a_forward_step_draws_depends_on_the_microbatch_alone(model):
    drawn: list[float] = []
    stepping(model, before=lambda: drawn.append(torch.rand(1).item()))
    for microbatch in (0, 0, 1):
        model.compute.forward(microbatch, 0, 2, None)
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_loss_of_one_number_may_have_any_shape(model, shape):
    stepping(model, report=lambda loss: loss[0].reshape(shape))
    model.compute.forward(0, 2, 4, model.compute.forward(0, 0, 2, None).detach())
    *_, total, count = model.end.local_totals().tolist()
    assert (total > 0.0, count) == (True, 1.0)


@pytest.mark.parametrize(
    ("report", "told"),
    [(lambda loss: loss[0].item(), "as a float"), (lambda loss: loss.repeat(2), r"shape \[4\]")],
)
def test_other_losses_are_refused(model, report, told):
    stepping(model, report=report)
    with pytest.raises(ConfigError, match=told):
        model.compute.forward(0, 2, 4, model.compute.forward(0, 0, 2, None).detach())


WRONG = {
    "no loss function": (lambda step: step[0], "the forward step returns a tensor of shape"),
    "nothing": (
        lambda step: None,
        "the forward step returns None, and the model's output and a loss function",
    ),
    "the loss alone": (
        lambda loss: loss[0],
        r"the loss function returns a tensor of shape \[\]: return loss, ",
    ),
    "no report": (lambda loss: loss[:2], r"returns \(a tensor of shape \[\], a tensor of shape \[\]\)"),
    "a number": (lambda loss: (loss[0].item(), *loss[1:]), "returns a float as the loss"),
    "many": (lambda loss: (loss[0].repeat(3), *loss[1:]), r"returns a tensor of shape \[3\] as the loss"),
    "detached": (lambda loss: (loss[0].detach(), *loss[1:]), "a loss without a gradient"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_script_s_functions_return_is_checked(model, wrong):
    change, told = WRONG[wrong]
    own_step = model.compute.forward_step

    def forward_step(iterator: Any, chunk: Any) -> Any:
        output, own_loss = own_step(iterator, chunk)
        if told.startswith("the forward step"):
            return change((output, own_loss))
        return output, own_loss and (lambda losses: change(own_loss(losses)))

    model.compute.forward_step = forward_step
    with pytest.raises(ConfigError, match=told):
        model.compute.forward(0, 2, 4, model.compute.forward(0, 0, 2, None).detach())


def test_a_sample_of_another_length_is_named(model):
    own_step = model.compute.forward_step

    def forward_step(iterator: Any, chunk: Any) -> Any:
        output, own_loss = own_step(iterator, chunk)
        return output[:-1], own_loss

    model.compute.forward_step = forward_step
    with pytest.raises(
        ConfigError, match=r"microbatch 0, samples \[0\]: activations have the shape \[15, .*must have"
    ):
        model.compute.forward(0, 0, 2, None)


def test_where_tokens_divide_the_loss_they_have_to_be_returned():
    def loss(losses: Any) -> Any:
        return losses.mean(), {"lm loss": losses.mean().detach()}

    step = scripted.checked(lambda iterator, model: (None, loss), sums_losses=True)
    with pytest.raises(ConfigError, match="number of tokens, which the loss function does not return"):
        step(None, None)[1](torch.ones(2))
    assert (
        len(scripted.checked(lambda *_: (None, loss), sums_losses=False)(None, None)[1](torch.ones(2))) == 2
    )


def test_a_step_whose_masks_leave_out_all_tokens_divides_by_nothing():
    assert clipped(0.0, loss_scale=2.0, tokens=0.0, clip_grad=1.0) == (0.5, 0.0)


def test_a_data_set_that_ends_too_early_is_refused_at_once(megatron):
    from odyssey_megatron.mcore.checks import check_samples

    class Anew(list[int]):
        def __getitem__(self, at: Any) -> Any:
            return super().__getitem__(at % len(self))

    for enough in (range(12), Anew([1, 2]), SimpleNamespace()):
        check_samples(enough, train_iters=3, global_batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has 11 samples, and training takes 12"):
        check_samples(range(11), train_iters=3, global_batch_size=4)


def test_data_that_differ_between_readings_or_ranks_are_noticed(megatron):
    from odyssey_megatron.mcore.checks import digest_of_samples

    def of(dataset: Any) -> str:
        return digest_of_samples(dataset, train_iters=3, global_batch_size=4)

    def samples(changed: int = -1) -> list[dict[str, Any]]:
        made = [{"tokens": torch.arange(at, at + 5), "name": "a"} for at in range(12)]
        if changed >= 0:
            made[changed]["tokens"] = made[changed]["tokens"].bfloat16()
        return made

    class Drawn(list[Any]):
        def __getitem__(self, at: Any) -> Any:
            return torch.rand(3) if at == 11 else super().__getitem__(at)

    assert of(samples()) == of(samples(changed=5)) != of(samples(changed=0))
    assert of(samples()) != of(samples(changed=11))
    with pytest.raises(ConfigError, match="sample 11 is another one when it is read a second time"):
        of(Drawn(samples()))


@pytest.mark.parametrize("schedule", [{"max_lr": 1e-1, "min_lr": 1e-3}, {"max_lr": 1e-2, "min_lr": 0.0}])
def test_one_learning_rate_is_not_trained_and_another_one_logged(megatron, schedule):
    from odyssey_megatron.mcore.checks import check_rates

    check_rates(RATES, {"max_lr": 1e-2, "min_lr": 1e-3})
    with pytest.raises(ConfigError, match="would log the latter"):
        check_rates(RATES, schedule)


def check(**changes: Any) -> None:
    """Check a job of whose fields some are wrong."""
    from odyssey_megatron.mcore.checks import check_job

    sizes = dict.fromkeys(("global_batch_size", "micro_batch_size", "seq_length", "vocab_size"), 8)
    job = {"train_iters": 1, "pipeline_model_parallel_size": 1, "loss_names": ("lm loss",), **sizes}
    job |= {"scheduler": SCHEDULE, "model": SimpleNamespace(optimizer_config=RATES), "squared_lengths": None}
    check_job(SimpleNamespace(**job | changes), sequence_balance="off")  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "12"])
def test_sizes_are_whole_numbers_of_one_or_more(megatron, wrong):
    check()
    with pytest.raises(ConfigError, match=f"has train_iters {wrong!r}, and a whole number"):
        check(train_iters=wrong)


def test_one_loss_name_is_not_taken_letter_by_letter(megatron):
    check(loss_names=["lm loss", "other"])
    with pytest.raises(ConfigError, match=r"Give it \('lm loss',\)"):
        check(loss_names="lm loss")


WRONG_SCHEDULES = {
    "unknown": ({"lr_decay_stile": "cosine"}, r"unknown arguments \(lr_decay_stile\)"),
    "style": ({"lr_decay_style": "cosinus"}, "cosinus decay style is not supported"),
    "increment style": ({"wd_incr_style": "square"}, "square weight decay increment style is not supported"),
    "WSD": ({"lr_decay_style": "WSD", "wsd_decay_steps": 8}, "styles that OptimizerParamScheduler knows"),
    "warm-up": ({"lr_warmup_steps": 50}, "warm-up must be shorter"),
}


@pytest.mark.parametrize("wrong", WRONG_SCHEDULES)
def test_a_schedule_that_megatron_does_not_know_is_refused_at_once(megatron, wrong):
    """Some of them Megatron would refuse only behind the warm-up."""
    change, told = WRONG_SCHEDULES[wrong]
    with pytest.raises(ConfigError, match=told):
        check(scheduler=SCHEDULE | change)


def test_what_megatron_knows_of_schedules_is_accepted(megatron):
    for style in ("cosine", "constant", "inverse-square-root", "linear"):
        check(scheduler=SCHEDULE | {"lr_decay_style": style})
    ends = {"lr_wsd_decay_style": "linear", "wsd_decay_steps": 8}
    check(scheduler=SCHEDULE | {"lr_decay_style": "WSD", **ends})


def test_a_schedule_that_lacks_something_is_refused_at_once(megatron):
    rates = ("max_lr", "min_lr")
    with pytest.raises(ConfigError, match=r"lacks some \(max_lr, min_lr\)"):
        check(scheduler={name: one for name, one in SCHEDULE.items() if name not in rates})


def test_ranks_do_something_together_in_on_end_alone(megatron):
    """Nowhere else may an operation over all ranks seem to be done."""
    from odyssey_megatron.mcore.plugin import Session
    from odyssey_megatron.rebuild.world import LivingWorld

    class Left:
        """The group of the two ranks that live."""

        rank, size = (lambda self: 0), (lambda self: 2)

        def allreduce(self, tensors: list[Any]) -> str:
            return "summed"

    everyone = LivingWorld(1, 3, "cpu")
    session: Any = SimpleNamespace(rank=1, world_size=3, config=SimpleNamespace(device="cpu"))
    found: list[Any] = []

    def on_end(model: Any) -> None:
        found.append((everyone.allreduce([torch.ones(1)]), everyone.rank(), everyone.size()))

    job: Any = SimpleNamespace(on_end=on_end)
    end = Session._ending_of(session, job, None, SimpleNamespace(living=everyone))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="allreduce over the default group"):
        everyone.allreduce([torch.ones(1)])
    end(SimpleNamespace(together=lambda work: work(Left())))  # type: ignore[arg-type]
    assert found == [("summed", 0, 2)]
    assert (everyone.rank(), everyone.size()) == (1, 3)
