"""Emulated accelerators: the structure of what runs, which no load of the machine changes. Times: the benchmark."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.metrics.run import read_run
from odyssey_megatron.plan.checking.simulate import simulate
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.schedule import schedule_from_text
from odyssey_megatron.policy.costs.profile import Profile, load_profile
from tests.launch.jobserver import CHECKOUT, JobServer, events
from tests.plan.samples import layer

pytest.importorskip("torch")

JOB = JobSpec(
    num_layers=6, pipeline_model_parallel_size=2, tensor_model_parallel_size=1, num_microbatches=8,
    tokens_per_step=8, train_steps=6,
)  # fmt: skip
COSTS = Costs(
    layers=(layer(0.001, 0.0, 0.001), *(layer(0.004, 0.005, 0.003),) * 4, layer(0.002, 0.002, 0.002)),
    message_bytes=0,
    link_latency_s=0.001,
    link_bytes_per_s=1e9,
    agreement_s=0.002,
    optimizer_s_per_byte=0.0005,
)
SPEEDS = {3: 0.5}


@pytest.fixture(scope="module")
def emulating():
    server = JobServer.start(["tests.execute.preload"])
    yield server
    server.close()


def test_only_what_jobs_are_forked_from_has_another_planner():
    """Whoever imports a job's description, or a benchmark of such jobs, goes on with the product's planner."""
    program = "import importlib; from odyssey_megatron.policy import planner as product"
    for module in ("tests.execute.emulation", "tests.benchmarks.slow_emulated", "tests.execute.preload"):
        program += f"; importlib.import_module({module!r}); print(product.PolicyPlanner.__name__)"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["PolicyPlanner", "PolicyPlanner", "EmulationPlanner"]


@pytest.mark.parametrize("policy", ["reroute", "replan"])
def test_ranks_that_know_their_own_part_keep_the_simulated_time(emulating, tmp_path, policy):
    from odyssey_megatron.codec import from_jsonable
    from tests.execute.emulation import Emulation

    run_dir = tmp_path / "run"
    emulation = Emulation(job=JOB, profile=Profile(costs=COSTS), speeds=tuple(SPEEDS.items()))
    replace(emulation, megatron_start=True, seamless=True).save(run_dir)
    job = emulating.run(
        ["--nproc-per-node", 6, CHECKOUT / "tests/execute/emulated.py", "--odyssey-device", "cpu",
         "--odyssey-run-dir", run_dir, "--odyssey-policy", policy,
         "--odyssey-inject", "rank=4,step=2,at=backward"],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    run = read_run(run_dir)
    assert [one.policy for one in run.recoveries] == [policy]
    assert run.samples.ok
    steps = {generation: [s for s in run.steps if s.generation == generation] for generation in (1, 2)}
    for decision in events(run_dir, "decision"):
        generation, layout = decision["generation"], from_jsonable(Layout, decision["layout"])
        schedule = schedule_from_text(decision["schedule"])
        expected_s = simulate(schedule, layout, COSTS, SPEEDS).step_s
        # The first step of a generation begins on each rank when it gets there.
        modelled_s = [step.losses["modelled_s"] for step in steps[generation][1:]]
        assert modelled_s == pytest.approx([expected_s] * len(modelled_s), rel=1e-6)
        assert modelled_s
        for worker, program in schedule.programs:
            ran = [
                e
                for e in events(run_dir, "trace")
                if (e["rank"], e["generation"]) == (worker, generation)
                and (generation, e["step"]) != (2, 2)  # that step had begun in generation 1
            ]
            if generation == 2 and run.recoveries[0].outcome == "resume":
                ran = [e for e in ran if e["step"] > run.recoveries[0].step]  # only the rest of that one ran
            assert ran
            for one in ran:
                assert [text for text, _, _ in one["instructions"]] == [str(i) for i in program[:-1]]
    held = [one["digest"] for one in events(run_dir, "weights")]
    assert {layer for one in held for layer in one} == {str(i) for i in range(JOB.num_layers)}
    assert {updates for one in held for updates in one.values()} == {JOB.train_steps}


def test_the_planner_learns_what_it_was_never_told(emulating, tmp_path):
    """Layers that take five times the estimate, a head that takes more than all others, links slower than was said."""
    from tests.execute.emulation import Emulation, Truth

    run_dir = tmp_path / "run"
    told = replace(COSTS, agreement_s=0.0, optimizer_s_per_byte=0.0, message_bytes=10**5)
    layers = (layer(0.001, 0.0, 0.001), *(layer(0.004, 0.005, 0.003),) * 4, layer(0.012, 0.014, 0.010))
    truth = Truth(
        costs=replace(told, layers=layers, link_latency_s=0.002, link_bytes_per_s=1e8, optimizer_s_per_byte=0.0008),
        noise=0.05, reduce_latency_s=0.001, reduce_bytes_per_s=1e9,
    )  # fmt: skip
    believed = replace(
        told,
        layers=tuple(
            replace(one, forward_s=0.0008, input_grad_s=0.0008, weight_grad_s=0.0008) for one in told.layers
        ),
    )
    Emulation(job=JOB, profile=Profile(costs=believed)).save(run_dir, truth)
    job = emulating.run(
        ["--nproc-per-node", 4, CHECKOUT / "tests/execute/emulated.py", "--odyssey-device", "cpu",
         "--odyssey-run-dir", run_dir, "--odyssey-profile-steps", 1, "--odyssey-inject", "rank=1,step=3,at=backward"],
        log=tmp_path / "log",
    )  # fmt: skip
    assert job.wait(60) == 0, job.log()
    learned = load_profile(run_dir / "profile.json").costs
    for first, last in ((0, 3), (3, 6)):
        for kind in ("forward_s", "input_grad_s", "weight_grad_s"):
            known, real = (
                sum(getattr(one, kind) for one in costs.layers[first:last])
                for costs in (learned, truth.costs)
            )
            assert known == pytest.approx(real, rel=0.05)
    assert learned.message_s() == pytest.approx(truth.costs.message_s(), rel=0.1)
    assert learned.optimizer_s_per_byte == pytest.approx(0.0008, rel=0.05)
    decided = events(run_dir, "decision")[1]
    (said_s,) = (row["step_s"] for row in decided["candidates"] if row["chosen"])
    ran = [step for step in read_run(run_dir).steps if step.generation == 2][1:]
    assert [step.losses["modelled_s"] for step in ran] == pytest.approx([said_s] * len(ran), rel=0.15)
    assert len(ran) >= 2


def test_megatrons_schedule_takes_what_the_formula_says():
    """(M + S - 1) slots: arXiv 2508.21613, Eq. 9."""
    from odyssey_megatron.cluster.state import initial_state
    from odyssey_megatron.policy.initial import initial_plan
    from tests.execute.emulation import one_f_one_b

    layers = (layer(0, 0, 0), *(layer(),) * 4, layer(0, 0, 0))
    costs = replace(COSTS, layers=layers, link_latency_s=0.0, agreement_s=0.0, optimizer_s_per_byte=0.0)
    profile = Profile(costs=replace(costs, link_bytes_per_s=1e12))
    plan = initial_plan(replace(JOB, pipeline_model_parallel_size=4), initial_state(nodes=(0,) * 4), profile)
    assert one_f_one_b(plan, profile.costs).step_s == pytest.approx((8 + 4 - 1) * 3)
    assert "B0[" in one_f_one_b(plan, profile.costs).schedule_text


def test_weights_come_beside_the_next_forwards_as_simulated(emulating, tmp_path):
    """Of three holders two keep each slice; what the first forward waits for lengthens each step."""
    from odyssey_megatron.codec import from_jsonable
    from odyssey_megatron.plan.scheduling.gathers import weights_late_s
    from odyssey_megatron.plan.scheduling.reductions import buckets
    from tests.execute.emulation import Emulation

    run_dir = tmp_path / "run"
    sizes = {"weight_bytes": 9_000_000, "gradient_bytes": 3_000_000, "optimizer_bytes": 3_000_000}
    layers = tuple(replace(one, **sizes) for one in COSTS.layers)
    costs = replace(COSTS, layers=layers, bucket_bytes=0, optimizer_s_per_byte=1e-9)
    job = replace(JOB, pipeline_model_parallel_size=1, optimizer_copies=2, train_steps=4)
    Emulation(job=job, profile=Profile(costs=costs), seamless=True).save(run_dir)
    ran = emulating.run(
        ["--nproc-per-node", 3, CHECKOUT / "tests/execute/emulated.py", "--odyssey-device", "cpu",
         "--odyssey-run-dir", run_dir],
        log=tmp_path / "log",
    )  # fmt: skip
    assert ran.wait(60) == 0, ran.log()
    (decision,) = events(run_dir, "decision")
    layout = from_jsonable(Layout, decision["layout"])
    late_s = weights_late_s(layout, buckets(layout, costs), costs)
    assert late_s > 0.008, "six and a half milliseconds a layer, and the first takes one"
    expected_s = simulate(schedule_from_text(decision["schedule"]), layout, costs, {}).step_s
    modelled_s = [step.losses["modelled_s"] for step in read_run(run_dir).steps[1:]]
    assert modelled_s == pytest.approx([expected_s] * 3, rel=1e-6)


def test_half_a_cell_takes_twice_as_long(emulating, tmp_path):
    """Of two cells of two ranks one has lost a rank for good: the other one is left, with fewer microbatches."""
    from odyssey_megatron.codec import from_jsonable
    from tests.execute.emulation import Emulation

    run_dir = tmp_path / "run"
    one_stage = {"pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 2, "train_steps": 60}
    Emulation(job=replace(JOB, **one_stage), profile=Profile(costs=COSTS), seamless=True).save(run_dir)
    ran = emulating.run(
        ["--nproc-per-node", 4, CHECKOUT / "tests/execute/emulated.py", "--odyssey-device", "cpu",
         "--odyssey-run-dir", run_dir, "--odyssey-respawn", 1,
         "--odyssey-inject", "rank=3,step=2,at=backward;rank=3,step=-1,at=groups,incarnation=1"],
        log=tmp_path / "log",
    )  # fmt: skip
    assert ran.wait(120) == 0, ran.log()
    steps = read_run(run_dir).steps
    decision = {one["generation"]: one for one in events(run_dir, "decision")}[steps[-1].generation]
    assert decision["shapes"] == [[1, 1]]
    layout = from_jsonable(Layout, decision["layout"])
    shares = {hop.worker: len(route.microbatches) for route in layout.routes for hop in route.hops}
    assert shares == {0: 5, 1: 3}
    costs = replace(COSTS, long_optimizers=((1, 2.0),))
    expected_s = simulate(schedule_from_text(decision["schedule"]), layout, costs, {1: 0.5}).step_s
    modelled_s = [one.losses["modelled_s"] for one in steps if one.generation == steps[-1].generation][1:]
    assert modelled_s
    assert modelled_s == pytest.approx([expected_s] * len(modelled_s), rel=1e-6)
    held = [one["digest"] for one in events(run_dir, "weights") if one["rank"] in (0, 1, 2)]
    assert {updates for one in held for updates in one.values()} == {60}
    assert len(held) == 3


@pytest.mark.matrix
def test_one_that_joins_waits_for_what_the_others_do_between_steps(emulating, tmp_path):
    """Which takes longer than a message may."""
    from tests.execute.emulation import Emulation

    run_dir = tmp_path / "run"
    job = replace(JOB, pipeline_model_parallel_size=1, train_steps=5)
    Emulation(job=job, profile=Profile(costs=COSTS), seamless=True, rests_s=3.0).save(run_dir)
    ran = emulating.run(
        ["--nproc-per-node", 3, CHECKOUT / "tests/execute/emulated.py", "--odyssey-device", "cpu",
         "--odyssey-run-dir", run_dir, "--odyssey-respawn", 1, "--odyssey-hang-s", 1, "--odyssey-op-timeout-s", 2,
         "--odyssey-inject", "rank=2,step=1,at=forward"],
        log=tmp_path / "log",
    )  # fmt: skip
    assert ran.wait(120) == 0, ran.log()
    assert [one["target"] for one in events(run_dir, "rank_joined")] == [2]
    assert all(one["rank"] != 2 for one in events(run_dir, "cut_short")), "it gave up"
    assert events(run_dir, "generation_started")[-1]["members"] == [0, 1, 2]
    assert not any("asked for it" in one["why"] for one in events(run_dir, "decision"))
