"""The state of a job as metrics, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from odyssey_megatron.metrics.goodput import by_bucket
from odyssey_megatron.metrics.live import Live
from odyssey_megatron.metrics.standing import DEAD, JOINS, SHADOW, TRAINS, WAITS
from odyssey_megatron.names import layer_name


def exposition(state: Live) -> bytes:
    """Return the answer to a scrape."""

    class Collected:
        def collect(self) -> Iterator[Any]:
            yield from _families(state)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collected())
    return bytes(generate_latest(registry))


def _families(state: Live) -> Iterator[Any]:
    yield from _training(state)
    yield from _goodput(state)
    yield from _stalls(state)
    yield from _workers(state)
    yield from _safety(state)


def _gauge(name: str, text: str, value: float | None, **labels: str) -> Iterator[Any]:
    """Yield a gauge, or nothing where there is no value."""
    if value is not None:
        family = GaugeMetricFamily(f"odyssey_{name}", text, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        yield family


def _training(state: Live) -> Iterator[Any]:
    last = state.steps[-1] if state.steps else None
    yield from _gauge("job_info", "Run folder and number of the job", 1, run=state.name, job=state.job)
    over = "1 once the job has ended: told by odyssey top --metrics-port alone, as a job's own port closes with it"
    yield from _gauge("job_over", over, float(state.is_over))
    yield from _gauge(
        "recovering", "1 while a failure is not answered by a plan in force", state.status == "recovering"
    )
    yield from _gauge("last_line_timestamp_seconds", "Newest line of the journal", state.heard_s)
    yield CounterMetricFamily("odyssey_steps", "Steps committed", value=state.committed)
    yield CounterMetricFamily("odyssey_tokens", "Tokens trained", value=state.goodput.tokens)
    yield from _gauge("step", "Last committed step, counted from 0", last.step if last else None)
    yield from _gauge("grad_norm", "Of the last step", last.grad_norm if last else None)
    loss = GaugeMetricFamily("odyssey_loss", "Of the last step, by its name", labels=["loss"])
    for name, value in (last.losses if last else {}).items():
        loss.add_metric([name], value)
    yield loss
    yield from _gauge(
        "step_seconds", "Median of the last 20 steps, from commit to commit, without saves", state.step_s
    )
    yield from _gauge(
        "ideal_step_seconds", "Median of undisturbed steps with all ranks", state.goodput.ideal_step_s
    )
    yield CounterMetricFamily("odyssey_saves_failed", "Checkpoints not saved", value=state.saves_failed)
    yield from _gauge("planned_step_seconds", "As the plan in force was weighed", state.planned_step_s)
    yield from _gauge("tokens_per_second", "Over the last 20 steps, without saves", state.tokens_per_s)


_FALLS = "; also falls, as it is made anew from the ideal step so far: no rate() or increase() over it"


def _goodput(state: Live) -> Iterator[Any]:
    worth = state.goodput
    yield from _gauge(
        "elapsed_seconds", "Since the launch, to the newest line of the journal", worth.elapsed_s
    )
    yield from _gauge("productive_seconds", f"Ideal step times of all steps{_FALLS}", worth.productive_s)
    yield from _gauge("goodput_ratio", "Productive of elapsed seconds", worth.share)
    seconds = GaugeMetricFamily(
        "odyssey_lost_seconds", f"Time that did not train, by Google's buckets{_FALLS}", labels=["bucket"]
    )
    tokens = GaugeMetricFamily(
        "odyssey_lost_tokens", f"That time at the ideal pace{_FALLS}", labels=["bucket"]
    )
    lost_tokens = dict.fromkeys(by_bucket(()), 0.0)
    for one in worth.lost:
        lost_tokens[one.bucket] += one.tokens
    for bucket, lost_s in by_bucket(worth.lost).items():
        seconds.add_metric([bucket], lost_s)
        tokens.add_metric([bucket], lost_tokens[bucket])
    yield seconds
    yield tokens


def _stalls(state: Live) -> Iterator[Any]:
    counts: dict[str, tuple[int, float]] = {}
    for one in state.stalls:
        cause = one.cause if one.is_failure else "plan change"
        count, total_s = counts.get(cause, (0, 0.0))
        counts[cause] = count + 1, total_s + (one.stall_s or 0.0)
    stalls = CounterMetricFamily("odyssey_stalls", "Moments in which nobody trained", labels=["cause"])
    stalled = CounterMetricFamily("odyssey_stall_seconds", "How long they took together", labels=["cause"])
    for cause, (count, total_s) in sorted(counts.items()):
        stalls.add_metric([cause], count)
        stalled.add_metric([cause], total_s)
    yield stalls
    yield stalled


def _workers(state: Live) -> Iterator[Any]:
    here = state.standing
    yield from _gauge("generation", "Memberships that the job has had", here.generation)
    ranks = GaugeMetricFamily("odyssey_ranks", "By what they are", labels=["state"])
    ranks.add_metric(["living"], state.living)
    ranks.add_metric(["dead"], len(here.dead))
    yield ranks
    yield from _gauge("gpus_given_up", "Taken for broken, until odyssey readmit", len(state.given_up))
    workers = GaugeMetricFamily("odyssey_workers", "By what they do", labels=["state"])
    for status in (TRAINS, SHADOW, WAITS, JOINS, DEAD):
        workers.add_metric([status], sum(one.status == status for one in here.places))
    yield workers
    slowness = GaugeMetricFamily(
        "odyssey_worker_slowness_ratio",
        "So many times what the same work takes elsewhere",
        labels=["worker", "replica", "stage", "node"],
    )
    for one in here.places:
        if one.slowness is not None:
            slowness.add_metric([str(one.worker), str(one.replica), str(one.stage), one.node], one.slowness)
    yield slowness


def _safety(state: Live) -> Iterator[Any]:
    here = state.standing
    yield from _gauge("losses_survived", "More workers that may be lost at once, whichever", here.survives)
    yield from _gauge("node_losses_survived", "More nodes that may be lost at once", here.survives_nodes)
    layers = GaugeMetricFamily("odyssey_layer_losses_survived", "As above, by layer", labels=["layer"])
    for margin in here.margins:
        for layer in range(margin.first, margin.last):
            layers.add_metric([layer_name(layer, here.num_layers)], margin.survives)
    yield layers
    nodes = GaugeMetricFamily(
        "odyssey_node_suspect", "1: leave it out of the next job; 0: watch it", labels=["node"]
    )
    for suspect in state.suspects:
        nodes.add_metric([suspect.node], suspect.is_to_exclude)
    yield nodes
