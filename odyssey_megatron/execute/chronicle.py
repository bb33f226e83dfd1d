"""What a rank writes to the journal, and publishes, about its steps and about its way between generations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from odyssey_megatron.execute.parts import Member
from odyssey_megatron.execute.phases import WayBack
from odyssey_megatron.execute.timing import Measurements, Trace
from odyssey_megatron.metrics.journal import Journal
from odyssey_megatron.plan.sending.generation import Generation
from odyssey_megatron.policy.costs.measured import StepSeen
from odyssey_megatron.recover import Phase


class Chronicle:
    """The records of one rank.

    Args:
        on_commit: Called with each committed step and its outcome, on the rank that speaks for all.
        trace_steps: The number of steps of each generation that are written down instruction by instruction.
    """

    def __init__(
        self,
        journal: Journal,
        member: Member,
        measured: Measurements,
        *,
        on_commit: Callable[[int, Any], None],
        trace_steps: int,
    ):
        self._journal, self._member, self._measured = journal, member, measured
        self._on_commit, self._trace_steps = on_commit, trace_steps
        self.way = WayBack()
        self.speaks = False
        """True on the member with the lowest rank, which speaks for all."""
        self.stalled_s = 0.0
        """Seconds that recoveries have cost, from detection until this rank trained again. Reset by whoever
        logs it.
        """
        self._generation: Generation | None = None
        self._step, self._outcome, self._is_told, self.steps_here = -1, None, True, 0
        """The last committed step and its outcome, whether they have been written down, and the number of
        steps that this rank has been through in this generation.
        """

    # -- from one generation to the next --------------------------------------------------------------------------

    def begin(self, generation: Generation) -> None:
        """Begin the records of ``generation``, which this rank enters."""
        if generation.previous is not None and not generation.planned:
            self.way.clock.note_abort(self._member.heard_s)
        self._generation, self.steps_here, self.speaks = generation, 0, False

    def in_groups(self, *, speaks: bool) -> None:
        self.way.in_groups_s, self.speaks = time.monotonic(), speaks

    def agreed(self) -> None:
        self.way.agreed_s = self._member.agreed_s = time.monotonic()

    def goes_on(self, outcome: str, taken_up: int) -> None:
        """Note how the interrupted step goes on: ``redo``, ``finish`` or ``resume``."""
        self.way.goes_on(outcome, taken_up)
        if self.speaks:
            self.speak()

    def started(self, step: int) -> None:
        """Write down that the generation has its layers, or that they are on their way."""
        generation = self._generation
        assert generation is not None
        self.way.started(generation)
        self.event(
            "generation_started",
            step,
            echo=self.speaks,
            members=list(generation.members),
            plan_hash=generation.plan_hash,
            policy=generation.plan.policy,
            agreed_s=self.way.agreed_s,
        )

    def filled(self, step: int, fill_s: float) -> None:
        """Write down that all layers are here; training has waited ``fill_s`` seconds for them."""
        generation = self._generation
        assert generation is not None
        if generation.planned:
            self.event(
                "switched",
                step,
                policy=generation.plan.policy,
                plan_hash=generation.plan_hash,
                **self.way.clock.taken_s(Phase.GROUPS, Phase.AGREE, Phase.TRANSFER),
                fill_s=fill_s,
            )

    def trains(self, step: int) -> None:
        """Write down the recovery, if there was one, as the next instruction is about to run."""
        if (recovered := self.way.ended()) is None:
            return
        self._measured.regroup_s = recovered.regroup_s
        self.stalled_s += recovered.stalled_s
        self.event("recovered", step, **recovered.record, echo=self.speaks)

    # -- steps ----------------------------------------------------------------------------------------------------

    def samples(self, step: int, samples: Mapping[int, list[int]]) -> None:
        # Before the agreement, since a rank may die right after it. A step may be attempted several times:
        # the last one counts.
        if samples:
            self.event("samples", step, microbatches=list(samples), samples=list(samples.values()))

    def committed(self, step: int, outcome: Any) -> None:
        self._step, self._outcome, self._is_told = step, outcome, False

    def log_last_step(self, step_s: float = -1.0) -> None:
        """Write down the last committed step, unless this rank has. The rank that usually does so may have died."""
        if self._is_told:
            return
        out: Any = self._outcome
        self.event(
            "step_committed",
            self._step,
            loss=out.losses,
            grad_norm=out.grad_norm,
            lr=out.lr,
            skipped=out.skipped,
            step_s=step_s,
            tokens=out.tokens,
            num_microbatches=out.num_microbatches,
        )
        if out.dealt is not None:
            natural, dealt = out.dealt
            self.event("step_dealt", self._step, natural=natural, dealt=dealt)
        self._is_told = True

    def speak(self, step_s: float = -1.0) -> None:
        """Report the last committed step for all ranks, unless that is done."""
        if not self._is_told:
            self.log_last_step(step_s)
            self._on_commit(self._step, self._outcome)

    def ended(
        self,
        step: int,
        trace: Trace,
        step_s: float,
        state_bytes: Callable[[], Mapping[int, int]],
        *,
        optimizer_bytes: Callable[[], int] = int,
        expert_loads: Callable[[], Mapping[int, float]] = dict,
        is_whole: bool = True,
    ) -> None:
        """Note that ``step`` is over.

        Args:
            state_bytes: Gives the bytes of state of each layer whose state is here.
            optimizer_bytes: Gives those of all optimizer state that is here.
            expert_loads: Gives how unevenly experts load gangs (``cluster/expert_loads.py``); all ranks know the same.
            is_whole: The step had all microbatches of the plan; it has fewer while the batch size ramps up.
                Only whole steps are compared with others and with the simulation of the plan.
        """
        generation = self._generation
        assert generation is not None
        self.steps_here += 1
        if self.speaks:
            self.speak(step_s)
        if generation.number > 1 and self.steps_here == 1 and not generation.planned:
            self.event("redone", step, redo_s=step_s)
        if self.steps_here <= self._trace_steps:
            self.event("trace", step, instructions=trace.to_jsonable())
        if trace.measured:
            took = StepSeen(step=step, generation=generation.number, seconds=step_s)
            measured = self._measured.with_step(
                step,
                trace,
                state_bytes(),
                took if self.steps_here > 1 and is_whole else None,
                optimizer_bytes(),
                expert_loads() if self.speaks else {},
            )
            self._member.reports.publish_observations(measured)

    def event(self, name: str, step: int, **values: Any) -> None:
        number = self._generation.number if self._generation else 0
        self._journal.event(name, generation=number, step=step, **values)
