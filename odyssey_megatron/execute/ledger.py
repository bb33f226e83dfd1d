"""What a device has really done, as it notes it itself.

A host runs ahead of its device. Once groups are aborted, what waits on the device for a message goes on with
garbage, and so does all that was queued behind it. When the host hears of the failure it does not know how
far the device has come. So each instruction first reads a word, in its turn on the device: do the groups
still hold? The word falls, from 1.0 to 0.0, before anything is aborted, so whatever reads it standing has
whole messages. What reads it fallen counts for nothing: its input is replaced by zeros, and so its gradients
are zero. Its own messages carry the word along, since their receiver may not have heard of the failure yet.
The host reads the words only at a failure; they say what has run.

On gloo a wait that fails raises, and nothing is queued: there are no words (None).
"""

from __future__ import annotations

import torch

Word = torch.Tensor | None
"""A tensor without dimensions on the device: 1.0, or 0.0 for what counts for nothing. None: there are no
words, as what has failed has raised.
"""


class Ledger:
    """Makes the words of one generation.

    Args:
        holds: 1.0 until the generation's groups are aborted, in the host's pinned memory, so that the device
            reads it when it comes to that; None on gloo.
        alone: A worker is one rank: nothing is sent or received inside an instruction.
    """

    def __init__(self, holds: torch.Tensor | None, device: torch.device, *, alone: bool):
        self._holds, self._device, self._alone = holds, device, alone

    def __bool__(self) -> bool:
        """Whether there are words at all."""
        return self._holds is not None

    def word(self, of_input: Word = None) -> Word:
        """Return the word of what begins now, with an input whose word is ``of_input``."""
        if self._holds is None:
            return None
        now = self._holds.to(self._device, non_blocking=True)
        # Not the product: what an aborted message has left in place of its word may be anything, and 0 * NaN
        # is not 0.
        return now if of_input is None else torch.where(now > 0, of_input.to(now.dtype), now)

    def at_end(self, word: Word, *, received: bool = False) -> Word:
        """Return the word of what began with ``word`` and ends now.

        It may have been cut off meanwhile if ranks compute together, or if something was ``received`` in the
        course of it.
        """
        return self.word(word) if received or not self._alone else word


def only_if(word: Word, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, of any shape, if the word stands, else zeros, whatever the tensor holds."""
    return tensor if word is None else torch.where(word > 0, tensor, 0.0)
