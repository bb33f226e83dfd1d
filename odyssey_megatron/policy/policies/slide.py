"""Keep the pipelines' stages; which stage of the short pipeline has no worker changes with each microbatch."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Sketch
from odyssey_megatron.policy.shapes.seating import seated
from odyssey_megatron.policy.shapes.slide import Slid, slid


class Slide(Policy):
    """All workers of the other pipelines share what a dead one leaves, and not only those of its stage."""

    name, order = "slide", 46

    def propose(self, case: Case) -> Iterable[Sketch]:
        """Propose the best shape after a change, if workers are alike."""
        if not case.recuts_alike:
            return
        shape = slid(case.search, len(case.alive), case.job.num_microbatches, thorough=case.thorough)
        if shape is not None:
            yield self._sketch(case, shape)

    def _sketch(self, case: Case, shape: Slid) -> Sketch:
        costs = case.profile.costs

        def layout() -> Layout:
            return seated(shape.layout, case.alive, case.previous, costs)

        return Sketch(
            make=layout,
            note=shape.note,
            least_step_s=shape.estimate_s + costs.agreement_s,
            fatal_share=0.0,
        )


POLICY = Slide()
