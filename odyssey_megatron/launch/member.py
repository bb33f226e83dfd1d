"""``Member``: a rank's side of the control plane. It hears of generations, and reports to the coordinator."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch.distributed as dist

from odyssey_megatron.cluster.events import Ask, GenerationLive, OfferFailed, RankFinished, RankJoined, Retry
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import from_json, to_json
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.errors import (
    ConfigError,
    ControlPlaneLost,
    Fenced,
    JobStopped,
    Superseded,
    Unsound,
)
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch import environment
from odyssey_megatron.launch.alike import History, end_if_shared
from odyssey_megatron.launch.control import Control
from odyssey_megatron.launch.generations import read_generation, with_all_routes
from odyssey_megatron.launch.heartbeat import Heartbeat
from odyssey_megatron.launch.signals import leave_to_agent
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.generation import Generation
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.wire import Head

FINISHED = "finished"
"""``Generation.why`` of the last one: every member has finished, there is nothing to recover."""

_RETRY_AFTER_S = 0.5
_MEETING_S = 0.1


class Member:
    """This process as a member of the job.

    Two threads: one beats a slot of shared memory that the agent reads, one waits for generations on its own
    connection. All methods are for the main thread. Methods that talk to the store raise ControlPlaneLost
    when it is gone.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        control: Control,
        watch: Control,
        config: OdysseyConfig,
        incarnation: int = 0,
        heartbeat: Heartbeat | None = None,
        journal: Journal | None = None,
    ):
        self.rank, self.world_size, self.incarnation, self.journal = rank, world_size, incarnation, journal
        self._control, self._watch, self._config, self._heartbeat = control, watch, config, heartbeat
        self._changed = threading.Condition()
        self._newest, self._newest_text = 0, ""
        self.heard_s = 0.0
        """When this rank heard of the newest generation, on its own clock."""
        self._history = History()
        self._seen = 0
        """The last number read: of the newest generation, or of one that is offered."""
        self._offer, self._offer_text = 0, ""
        self._lost: ControlPlaneLost | Fenced | None = None
        """Why this rank cannot go on, whatever it is doing."""
        self._on_newer: dict[int, Callable[[], None]] = {}
        self._on_offer: Callable[[Generation], None] = lambda offered: None
        self._settled = not self.joins
        """Whether this rank may hold something: else it only waits to be offered a place."""
        if self._settled:
            self._start_watch()

    @property
    def joins(self) -> bool:
        """Whether this process takes the place of one that has died, in a job that runs."""
        return self.incarnation > 0

    def _start_watch(self) -> None:
        self._history.note(self._seen)
        threading.Thread(target=self._run_watch, name="odyssey-watch", daemon=True).start()

    def meet(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Waits until new processes of all ``ranks``, this one's cell, are here; their incarnations.

        That may take as long as the job: until then this rank stands by.

        Raises:
            JobStopped: the job ended first.
        """
        here = [keys.here_key(rank) for rank in ranks]
        self._control.put(keys.here_key(self.rank), str(self.incarnation))
        while True:
            if self._control.has(here) and all(incarnations := self._control.read(here)):
                if len(here) > 1:
                    args = (here, incarnations)
                    threading.Thread(
                        target=self._keep_company, args=args, name="odyssey-cell", daemon=True
                    ).start()
                return tuple(map(int, incarnations))
            if self._control.has([keys.VERDICT]):
                raise JobStopped("the job finished first", 0)
            time.sleep(_MEETING_S)

    def _keep_company(self, here: Sequence[str], incarnations: Sequence[str]) -> None:
        """Until this rank holds something the coordinator does not say that one of its cell has died. Whoever comes in
        its place must meet a process that starts anew, too.
        """
        while True:
            time.sleep(_MEETING_S)
            if self._settled:
                continue
            with contextlib.suppress(ControlPlaneLost):  # the main thread will notice
                if self._control.read(here) != incarnations:
                    break
        with self._changed:
            self._lost = Fenced(f"rank {self.rank} has lost another rank of its cell")
            self._end_before(math.inf)
            self._changed.notify_all()

    @property
    def left_alone(self) -> bool:
        """Whether this process has lost another one of its cell before it held anything."""
        return isinstance(self._lost, Fenced)

    def join(self) -> None:
        """A new process in the place of a dead rank: says that it is ready, and follows the generations from here on.

        Everything that takes time should be done by now, since the others will wait for this rank in their steps.

        Raises:
            Fenced: the rank is alive.
        """
        node = int(os.environ.get("GROUP_RANK", "0"))
        self._control.send(RankJoined(rank=self.rank, node=node, incarnation=self.incarnation))
        answer = keys.welcome_key(self.rank, self.incarnation)
        self._wait([answer], "been welcomed")
        text = self._control.get(answer)
        if text == keys.NOT_WELCOME:
            raise Fenced(f"rank {self.rank} is alive, so no other process can take its place")
        self._seen = int(text)
        self._start_watch()

    @classmethod
    def connect(cls, config: OdysseyConfig, *, journal: Journal | None = None) -> Member:
        """Joins the job that started this process. Raises ConfigError if ``odyssey run`` did not."""
        env = environment.of_rank()
        environment.die_with(int(env["ODYSSEY_PARENT_PID"]))
        host, port, token = env["MASTER_ADDR"], int(env["MASTER_PORT"]), env["ODYSSEY_TOKEN"]
        rank, incarnation = int(env["RANK"]), int(env.get("ODYSSEY_INCARNATION", "0"))
        # The first sign of life before the connects: from here on the agent notices a hang.
        heartbeat = Heartbeat(env["ODYSSEY_HEARTBEAT"], int(env["ODYSSEY_SLOT"]), config.heartbeat_s)
        if env.get("ODYSSEY_ON_SIGTERM") in ("save", "leave"):
            leave_to_agent(lambda: heartbeat.asked)
        control, watch = (
            Control.connect(
                host,
                port,
                token,
                timeout_s=config.store_timeout_s,
                lease_s=config.node_lease_s,
                writer=f"rank{rank}",
                incarnation=incarnation,
            )
            for _ in range(2)
        )
        return cls(
            rank=rank,
            world_size=int(env["WORLD_SIZE"]),
            control=control,
            watch=watch,
            config=config,
            incarnation=incarnation,
            heartbeat=heartbeat,
            journal=journal,
        )

    @property
    def asked(self) -> Ask:
        """What this node's agent, which was sent a signal, wants of its ranks. Reads memory."""
        return Ask.NOTHING if self._heartbeat is None else self._heartbeat.asked

    @property
    def store(self) -> dist.Store:
        """The raw store under the job's prefix, for the addresses of groups."""
        return self._control.store

    # -- before training ------------------------------------------------------------------------------

    def post_job(self, job: JobSpec, profile_json: str) -> None:
        """Tells the coordinator what to plan for. Collective.

        Raises:
            ConfigError: the ranks disagree, so they were not started with the same arguments.
        """
        text = to_json({"job": to_json(job), "profile": profile_json})
        digest = hashlib.sha256(text.encode()).hexdigest()
        if self.joins:
            if self._control.get(keys.digest_key(0)) != digest:
                raise ConfigError(
                    f"rank {self.rank} was not started for the job that it would join: its model, batch or profile "
                    "differ. Use the arguments that the job was started with."
                )
            return
        self._control.put(keys.observations_key(self.rank), "")
        if self.rank == 0:
            self._control.put(keys.JOB, text)
        self._control.put(keys.digest_key(self.rank), digest)
        everyone = [keys.digest_key(rank) for rank in range(self.world_size)]
        self._wait(everyone, "posted its job")
        differ = [rank for rank, key in enumerate(everyone) if self._control.get(key) != digest]
        if differ:
            raise ConfigError(
                f"the ranks were not started for the same job: the model, batch and profile of rank(s) "
                f"{differ} differ from those of rank {self.rank}. Use the same arguments and the same "
                "--odyssey-profile file on all nodes."
            )

    def refuse(self, error: ConfigError | Unsound) -> NoReturn:
        """Ends this rank, and the job. The launcher prints one rank's message, once."""
        if self._settled:
            self._control.put_first(keys.REFUSED, str(error))
        else:  # a rank that would join: the others do without it
            sys.stderr.write(f"[odyssey] rank {self.rank} cannot join: {error}\n")
        raise SystemExit(error.exit_code)

    def fail(self, error: Exception) -> None:
        """Before this rank ends by an exception of its own: does not return if others have it, too."""
        end_if_shared(self._control, error, rank=self.rank, generation=self._newest, history=self._history)

    def wait_all(self, name: str) -> None:
        """A barrier over all ranks of the start, once a ``name``. Nobody waits for a rank that has died."""
        if self.joins:
            return
        done, ends_s = f"barrier/{name}", time.monotonic() + self._config.store_timeout_s
        if self._control.count(f"{done}/count") == self.world_size:
            self._control.put(done, "")
        while not self._control.has([done]):
            if self.newer_than(1):
                return
            if time.monotonic() > ends_s:
                self._wait([done], f"reached barrier {name!r}")
            time.sleep(0.005)

    @contextlib.contextmanager
    def rank_zero_first(self, name: str = "rank-zero-first") -> Iterator[None]:
        """Runs the body on rank 0, then on all others: for what rank 0 leaves behind on disk."""
        if self.rank != 0:
            self._wait([name], "prepared the data set")
        yield
        if self.rank == 0:
            self._control.put(name, "")

    def excused(self) -> contextlib.AbstractContextManager[None]:
        """In the body this rank is not taken for hung: for compiled code that keeps the GIL. Its death is noticed."""
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.excused()

    # -- generations ----------------------------------------------------------------------------------

    def newer_than(self, number: int) -> bool:
        """Whether a generation after ``number`` exists (or the control plane is lost). Reads a variable."""
        return self._newest > number or self._lost is not None

    def on_newer(self, number: int, callback: Callable[[], None]) -> None:
        """Makes the watcher call ``callback`` when generation ``number`` ends, *before* anyone can see a newer one.

        Also called when the control plane is lost.
        """
        with self._changed:
            self._on_newer[number] = callback

    def forget(self, number: int) -> None:
        """Nothing is to be called any more when generation ``number`` ends."""
        with self._changed:
            self._on_newer.pop(number, None)

    def on_offer(self, callback: Callable[[Generation], None]) -> None:
        """Makes the watcher call ``callback`` for each generation that is offered from now on."""
        self._on_offer = callback

    def take_offer(self, number: int) -> None:
        """This rank enters offered generation ``number``, unless a newer one has ended it."""
        with self._changed:
            if self._offer == number and self._newest < number:
                self._newest, self._newest_text = number, self._offer_text
                self._history.note(number)

    def next_generation(self, after: int, timeout_s: float | None = None) -> Generation:
        """Blocks for the newest generation after ``after``, asking for one if none comes soon.

        Args:
            after: the last generation this rank was in; 0 before the first.
            timeout_s: default ``recovery_timeout_s``; ``store_timeout_s`` for the first. A rank that joins waits
                for as long as it takes.

        Raises:
            Fenced: the others go on without this rank (I8).
            ControlPlaneLost: also if no generation came in time.
        """
        if not self._settled:
            return self._next_with_this_rank(after)
        if timeout_s is None:
            timeout_s = self._config.recovery_timeout_s if after else self._config.store_timeout_s
        ends_s = time.monotonic() + timeout_s
        if after and not self._await_newer(after, min(_RETRY_AFTER_S, timeout_s)):
            self.ask_retry(after, f"no newer generation within {_RETRY_AFTER_S} s")
        generation = None
        while generation is None:
            if not self._await_newer(after, ends_s - time.monotonic()):
                raise ControlPlaneLost(f"no generation after {after} within {timeout_s} s")
            with self._changed:
                after, text = self._newest, self._newest_text
            generation = read_generation(text, self.rank, self._control)
        if self._waits_in(generation):
            self._settled = False
            return self._next_with_this_rank(generation.number)
        if not generation.stop and not self._belongs_to(generation):
            raise self._fenced_by(generation)
        return generation

    def with_all_routes(self, number: int, layout: Layout) -> Layout:
        """``layout`` of generation ``number``, which this rank is in, with the ways that all microbatches go.

        Raises:
            Superseded: it has ended.
        """
        return with_all_routes(self._control, number, layout)

    def _fenced_by(self, generation: Generation) -> Fenced:
        if self.journal:
            self.journal.event("fenced", generation=generation.number, why=generation.why)
        return Fenced(
            f"generation {generation.number} goes on without rank {self.rank}, which was declared dead or whose "
            f"cell has lost a rank (lost: {list(generation.dead)})"
        )

    def _is_this_process(self, generation: Generation) -> bool:
        """Not if another process has this rank by now."""
        return dict(generation.incarnations).get(self.rank, 0) == self.incarnation

    def _belongs_to(self, generation: Generation) -> bool:
        return self.rank in generation.members and self._is_this_process(generation)

    def _waits_in(self, generation: Generation) -> bool:
        """A recovery goes on without this rank, which holds nothing, and offers it a place afterwards."""
        outside = self.rank in generation.fresh and self.rank not in generation.members
        return outside and self._is_this_process(generation)

    def _next_with_this_rank(self, seen: int) -> Generation:
        """Waits to be offered a place, for as long as it takes. Raises as :meth:`next_generation`."""
        while True:
            with self._changed:
                while max(self._newest, self._offer) <= seen and self._lost is None:
                    self._changed.wait()
                if self._lost is not None:
                    raise self._lost
                seen, offered = max(self._newest, self._offer), self._offer > self._newest
                text = self._offer_text if offered else self._newest_text
            generation = read_generation(text, self.rank, self._control)
            if generation is None:
                continue
            if generation.why == FINISHED or generation.stop:
                raise JobStopped(generation.stop or "the job finished first", generation.stop_code)
            if self._belongs_to(generation):
                self.take_offer(generation.number)
                return generation
            if not offered and not self._waits_in(generation):
                raise self._fenced_by(generation)

    def report_live(self, number: int, done: int = 0) -> None:
        """Says that this rank holds all its state of generation ``number``. Returns once on record. ``done``: pieces
        of common work so far, by which the coordinator sees that the job gets on.
        """
        self._settled = True
        live = GenerationLive(rank=self.rank, generation=number, done=done)
        self._control.send(live, acknowledged=True)

    def decline(self, number: int, reason: str) -> None:
        """This rank cannot prepare offered generation ``number``."""
        self._control.send(OfferFailed(rank=self.rank, generation=number, reason=reason))

    def ask_retry(self, number: int, reason: str) -> None:
        """Asks for fresh groups, although nobody may have died. Ignored once ``number`` is outdated."""
        self._control.send(Retry(rank=self.rank, generation=number, reason=reason))

    def note(self, name: str, value: str) -> None:
        """Leaves ``value`` for whoever takes over a task of this rank's."""
        self._control.put(f"note/{name}", value)

    def noted(self, name: str) -> str | None:
        """The newest value left under ``name``, if there is one."""
        return self._control.peek(f"note/{name}")

    def publish_observations(self, observations_json: str) -> None:
        """Replaces what the coordinator knows of this rank's measured costs when it next decides."""
        self._control.put(keys.observations_key(self.rank), observations_json)

    def finish(self, number: int, early: int = -1) -> None:
        """Call after the last step: returns when every member of generation ``number`` got here. ``early``: after so
        many, as the job was asked to end; -1: after all.

        Raises:
            Superseded: somebody died first, and the others may need this rank to finish their step.
        """
        self.report_live(number)
        self._control.send(RankFinished(rank=self.rank, generation=number, early=early))
        self._await_newer(number, None)
        if self._lost is not None:
            raise self._lost
        if from_json(Head, self._newest_text).why != FINISHED:
            raise Superseded(f"generation {self._newest} came while rank {self.rank} was finishing")
        # What the script still does may be what the training was for: it has not left before its end.
        atexit.register(self._leave)

    def _leave(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.leave()
        with contextlib.suppress(ControlPlaneLost):
            self._control.put(keys.left_key(self.rank), "")

    # -- threads --------------------------------------------------------------------------------------

    def _await_newer(self, after: int, timeout_s: float | None) -> bool:
        with self._changed:
            found = self._changed.wait_for(lambda: self.newer_than(after), timeout_s)
        if self._lost is not None:
            raise self._lost
        return found

    def _run_watch(self) -> None:
        try:
            self._follow_generations()
        except Exception as error:  # noqa: BLE001 - a rank that hears of nothing any more must leave
            why = f"the thread that hears of generations failed: {error!r}. Please report this."
            with self._changed:
                self._lost = error if isinstance(error, ControlPlaneLost) else ControlPlaneLost(why)
                self._end_before(sys.maxsize)
                self._changed.notify_all()

    def _follow_generations(self) -> None:
        while True:
            number = self._seen + 1
            try:
                text = self._watch.get(keys.generation_key(number))
            except ValueError:  # not sealed by the coordinator, whose own write will replace it
                time.sleep(0.01)
                continue
            self._seen = number
            if text.startswith(keys.OFFER):
                self._hear_offer(number, text.removeprefix(keys.OFFER))
                continue
            with self._changed:
                # Were the abort to come second, it would hit the groups that the main thread builds for it.
                heard_s = time.monotonic()
                self._end_before(number)
                self._newest_text, self._newest, self.heard_s = text, number, heard_s
                self._history.note(number)
                self._changed.notify_all()

    def _hear_offer(self, number: int, text: str) -> None:
        with self._changed:
            settled = self._settled
            if not settled:
                self._end_before(number)  # the offer that it is getting ready for has come to nothing
            self._offer, self._offer_text = number, text
            self._changed.notify_all()
        offered = read_generation(text, self.rank, self._watch)
        # One that holds nothing yet has nothing else to do: it enters the generation, and builds its groups, itself.
        if settled and offered is not None and self._belongs_to(offered):
            self._on_offer(offered)

    def _end_before(self, number: float) -> None:
        for one in [one for one in self._on_newer if one < number]:
            self._on_newer.pop(one)()

    def _wait(self, names: list[str], what: str) -> None:
        try:
            self._control.wait(names, self._config.store_timeout_s)
        except TimeoutError:
            raise ControlPlaneLost(
                f"rank {self.rank} waited {self._config.store_timeout_s} s, but not every rank has {what}. "
                "Look for the first error in the other ranks' logs, or raise --odyssey-store-timeout-s."
            ) from None
