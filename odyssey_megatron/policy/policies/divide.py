"""Make new pipelines; microbatches that do not divide among them go through several."""

from __future__ import annotations

from collections.abc import Iterable

from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.policy.case import Case
from odyssey_megatron.policy.proposal import Policy, Sketch
from odyssey_megatron.policy.shapes.divide import divided, named
from odyssey_megatron.policy.shapes.seating import PipelineShapes, place


class Divide(Policy):
    """Pipelines that are alike get as many microbatches as all can do; the others go wherever there is time."""

    name, order = "divide", 45

    def propose(self, case: Case) -> Iterable[Sketch]:
        """Propose shapes after a change, if workers are alike."""
        if not case.recuts_alike:
            return
        for shape in divided(case.search, len(case.alive), case.job.num_microbatches):
            yield self._sketch(case, shape)

    def _sketch(self, case: Case, shape: PipelineShapes) -> Sketch:
        costs = case.profile.costs

        def layout() -> Layout:
            return place(shape, case.alive, case.previous, costs)

        return Sketch(
            make=layout,
            note=named(shape),
            least_step_s=shape.estimate_s + costs.agreement_s,
            fatal_share=0.0,
        )


POLICY = Divide()
