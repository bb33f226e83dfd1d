"""What a device has really done, as it notes it by itself.

A host runs ahead of its device. Once groups are aborted, what waits there for a message goes on with garbage, and so
does all that was queued behind it; when the host hears of the failure it does not know how far the device has come. So
each instruction first reads a word, in its turn on the device: do the groups still hold? It falls before anything is
aborted, so that whatever reads it standing has whole messages. What reads it fallen is multiplied by nothing: its input
is zero, and its gradients are. Its own messages carry the word along, since who gets them may not have heard yet. The
words are read by the host at a failure only, and say what has run.

On gloo a wait that fails raises, and nothing is queued: there are no words (None).
"""

from __future__ import annotations

import torch

Word = torch.Tensor | None
"""On the device, of no dimensions: 1.0, or 0.0 for what counts for nothing. None: it has run, or this would not."""


class Ledger:
    """Makes words.

    Args:
        holds: 1.0 in the host's memory until the generation's groups are aborted, pinned so that the device reads it
            when it comes to that; None on gloo.
        alone: a worker is one rank: nothing is sent or received inside an instruction.
    """

    def __init__(self, holds: torch.Tensor | None, device: torch.device, *, alone: bool):
        self._holds, self._device, self._alone = holds, device, alone

    def __bool__(self) -> bool:
        """Whether there are words at all."""
        return self._holds is not None

    def word(self, of_input: Word = None) -> Word:
        """Of what begins now, with an input that has come with a word."""
        if self._holds is None:
            return None
        now = self._holds.to(self._device, non_blocking=True)
        # No product: what an aborted message has left in place of its word may be anything, and 0 * NaN is not 0.
        return now if of_input is None else torch.where(now > 0, of_input.to(now.dtype), now)

    def at_end(self, word: Word, *, received: bool = False) -> Word:
        """Of what began with ``word`` and ends now. Where ranks compute together, or something was ``received`` within,
        it may have been cut off there.
        """
        return self.word(word) if received or not self._alone else word


def only_if(word: Word, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` if the word stands, else zeros, whatever it holds."""
    return tensor if word is None else torch.where(word > 0, tensor, 0.0)
