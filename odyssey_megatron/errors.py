"""The exception tree and the exit codes of the ``odyssey`` commands.

Every message says three things: what happened, the numbers, and what to do about it.
"""

from __future__ import annotations

from odyssey_megatron.names import layer_names

EXIT_BAD_INPUT = 2
"""The command line, the data or the layout is wrong; nothing was trained."""

EXIT_AS_ASKED = 92
"""A signal asked the job to end early, and it has, behind a step and in the way that training ends."""

EXIT_LAYERS_LOST = 93
"""The last holder of some layer is gone (I9); the job stopped at its last committed step."""

EXIT_FENCED = 94
"""Of a rank, not of the job: the others go on without it, since its cell has lost a rank, or it was declared dead."""

EXIT_UNSOUND = 95
"""The numbers are wrong on all ranks alike, and nobody should train on with them: see :class:`Unsound`."""

EXIT_NOT_SAVED = 96
"""All steps are trained, but the last checkpoint could not be saved."""

EXIT_ALIKE = 97
"""Of a rank, not of the job: another rank has failed with the same error, so that the job ends, with code 1."""

EXIT_LEFT_OUT = 98
"""Of a rank, not of the job: its numbers are not those of the others that should have the same (:class:`LeftOut`)."""


class OdysseyError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(OdysseyError):
    """The user's input cannot work. Raised before training starts."""

    exit_code = EXIT_BAD_INPUT


class MegatronIncompatible(ConfigError):
    """A seam of the installed Megatron is missing or changed: found, expected, tested versions."""


class LayoutInvalid(OdysseyError):
    """A layout breaks an invariant of layouts (every microbatch through every layer)."""


class ScheduleInvalid(OdysseyError):
    """A schedule fails ``verify()``: something missing, twice, unmatched or deadlocked."""


class PlanInfeasible(OdysseyError):
    """A candidate cannot be built; carries the binding constraint and the nearest feasible value."""


class LayersLost(OdysseyError):
    """Nobody is left with all that some layers consist of (I9). Exit code 93.

    Args:
        ranks: those that had it.
        num_layers: of the whole model, with embedding and head.
        copies: on how many holders of a layer its optimizer state was, where holders of all of ``layers`` are left.
    """

    def __init__(self, layers: tuple[int, ...], ranks: tuple[int, ...], *, num_layers: int, copies: int = 0):
        self.layers, self.ranks, self.num_layers, self.copies = layers, ranks, num_layers, copies
        what, remedy = (
            (
                "copy of the optimizer state is left of",
                f"--odyssey-redundancy-level {copies}: it keeps {copies + 1} copies of a layer's optimizer state, of "
                f"which --use-distributed-optimizer had {copies}",
            )
            if copies
            else (
                "holder is left of",
                "more data parallelism or --odyssey-redundancy state, so that each layer has a second holder",
            )
        )
        super().__init__(
            f"no {what} {layer_names(layers, num_layers)}: rank(s) {list(ranks)} had it and are dead. "
            "Nothing can be trained without; the job stops at its last committed step. Restart from the last "
            f"checkpoint, with {remedy}."
        )


class Superseded(OdysseyError):
    """A newer generation exists, so the operation under way is void. Caught by the recovery loop."""


class PeerFailed(OdysseyError):
    """A message to or from a peer failed; the recovery loop waits for the generation that says why."""


class Fenced(OdysseyError):
    """This rank was declared dead (I8): it must stop and may only come back as a new one."""


class LeftOut(Fenced):
    """This rank is the odd one out among three or more: its hardware computes wrongly, or its memory has changed."""

    exit_code = EXIT_LEFT_OUT


class ControlPlaneLost(OdysseyError):
    """The coordinator's store is gone; the job ends cleanly."""


class TransferIncomplete(OdysseyError):
    """A layer that the plan gives to this worker did not arrive: a bug in the plan or the transfer."""


class Unsound(OdysseyError):
    """Raised by all ranks alike where training on would make it worse."""

    exit_code = EXIT_UNSOUND


class NotFinite(Unsound):
    """The loss or the gradient norm is not finite; the weights are unchanged."""


class HoldersDiffer(Unsound):
    """Two holders of a layer have not the same bytes, and nobody can tell who is right."""


class TensorsDiffer(Unsound):
    """A sender and a receiver have not the same tensors of a layer."""


class JobStopped(OdysseyError):
    """The coordinator ended the job; ``exit_code`` says how (93: layers lost)."""

    def __init__(self, why: str, exit_code: int):
        self.exit_code = exit_code
        super().__init__(why)
