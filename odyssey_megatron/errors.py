"""The exception tree and the exit codes of the ``odyssey`` commands.

Every message says three things: what happened, the numbers, and what to do about it.
"""

from __future__ import annotations

from odyssey_megatron.names import layer_names

EXIT_BAD_INPUT = 2
"""The command line, the data or the layout is wrong; nothing was trained."""

EXIT_AS_ASKED = 92
"""A signal asked the job to end early, and it did: after a complete step, in the way that training ends. Its last
checkpoint may have failed, which the job's last line says then.
"""

EXIT_LAYERS_LOST = 93
"""The last holder of some layer is gone (I9); the job stopped at its last committed step."""

EXIT_FENCED = 94
"""Exit code of a rank, not of the job: its cell has lost a rank, or it was declared dead, and the others go on."""

EXIT_UNSOUND = 95
"""The job's numbers are wrong, and nobody should train on with them: see :class:`Unsound`."""

EXIT_NOT_SAVED = 96
"""All steps are trained, but the last checkpoint could not be saved. Ranks end with it behind a signal, too, where
the job ends with EXIT_AS_ASKED.
"""

EXIT_ALIKE = 97
"""Exit code of a rank, not of the job: another rank has failed with the same error, so the job ends with code 1."""

EXIT_LEFT_OUT = 98
"""Exit code of a rank, not of the job: its numbers are wrong, and the others go on (:class:`LeftOut`)."""

ENDS_OF_RANKS = frozenset({EXIT_FENCED, EXIT_ALIKE, EXIT_LEFT_OUT})
"""Exit codes of ranks that no job ends with."""

ENDS_OF_JOB = frozenset({EXIT_BAD_INPUT, EXIT_UNSOUND, EXIT_NOT_SAVED, EXIT_ALIKE})
"""Exit codes of ranks that end with the job, which say nothing against the machine."""


class OdysseyError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(OdysseyError):
    """The user's input cannot work. Raised before training starts."""

    exit_code = EXIT_BAD_INPUT


class MegatronIncompatible(ConfigError):
    """A seam of the installed Megatron is missing or changed.

    The message says what was found, what was expected, and which versions are tested.
    """


class LayoutInvalid(OdysseyError):
    """A layout breaks an invariant of layouts, such as that every microbatch goes through every layer."""


class ScheduleInvalid(OdysseyError):
    """A schedule fails ``verify()``: something in it is missing, duplicated, unmatched or deadlocked."""


class PlanInvalid(OdysseyError):
    """A plan takes for granted what is not so: some rank, part of a layer or span of its state is not there."""


class PlanInfeasible(OdysseyError):
    """A candidate cannot be built; carries the binding constraint and the nearest feasible value."""


class LayersLost(OdysseyError):
    """Some layers, or their optimizer state, are lost: no living worker has them (I9). Exit code 93.

    Args:
        layers: the lost layers.
        ranks: the dead ranks that had them.
        num_layers: the number of layers of the whole model, including embedding and head.
        copies: if ``layers`` still have holders, and only their optimizer state is lost: the number of copies that
            there were of it; else 0.
    """

    def __init__(self, layers: tuple[int, ...], ranks: tuple[int, ...], *, num_layers: int, copies: int = 0):
        self.layers, self.ranks, self.num_layers, self.copies = layers, ranks, num_layers, copies
        self.lost = "the optimizer state of " * bool(copies) + layer_names(layers, num_layers)
        """In words, what nobody else has."""
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
    """A message to or from a peer failed. The recovery loop then waits for the generation that explains it."""


class OutOfMemory(PeerFailed):
    """This rank has run out of its device's memory. The recovery loop asks for a plan that needs less."""


class Fenced(OdysseyError):
    """This rank was declared dead (I8): it must stop, and only a new process may take its place."""


class LeftOut(Fenced):
    """This rank's numbers are wrong, as its peers' show: its hardware computes wrongly, or its memory has changed."""

    exit_code = EXIT_LEFT_OUT


class ControlPlaneLost(OdysseyError):
    """The coordinator's store is gone; the job ends cleanly."""


class TransferIncomplete(OdysseyError):
    """A layer, or state of it, that the plan gives to this worker did not arrive: a bug in plan or transfer."""


class Unsound(OdysseyError):
    """The job's numbers are wrong, and training on would make it worse. All ranks raise it alike."""

    exit_code = EXIT_UNSOUND


class NotFinite(Unsound):
    """The loss or the gradient norm is not finite; the weights are unchanged."""


class HoldersDiffer(Unsound):
    """The holders of a layer do not have the same bytes, and it cannot be told whose are right."""


class TensorsDiffer(Unsound):
    """A sender and a receiver do not have the same tensors of a layer."""


class JobStopped(OdysseyError):
    """The coordinator ended the job; ``exit_code`` says why (93: layers lost)."""

    def __init__(self, why: str, exit_code: int):
        self.exit_code = exit_code
        super().__init__(why)
