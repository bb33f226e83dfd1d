"""What all ranks of a Megatron-LM job do together besides steps: barriers, evaluations, checkpoints."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from odyssey_megatron.errors import OdysseyError, PeerFailed, Superseded
from odyssey_megatron.execute.rank import RankRuntime
from odyssey_megatron.mcore.loop import arguments, checkpoint
from odyssey_megatron.mcore.loop.living import LivingGroups
from odyssey_megatron.mcore.model.layers import empty_chunk
from odyssey_megatron.mcore.model.model import MegatronModel
from odyssey_megatron.mcore.plugin import Session
from odyssey_megatron.recover import Recovery


@dataclass(kw_only=True)
class CommonWork:
    """One rank's part in common work, from the first generation on."""

    session: Session
    runtime: RankRuntime
    recovery: Recovery
    model: MegatronModel
    groups: LivingGroups
    chunks: list[Any]
    """Megatron's list of model chunks, which is kept up to date."""

    def together(self, work: Callable[[Any], Any]) -> Any:
        """``recover.Recovery.together``; ``work`` may use Megatron's groups and chunks as in a job without failures."""

        def guarded(world: Any) -> Any:
            self.refresh()
            with self.groups.world.inside():
                try:
                    return work(world)
                except OdysseyError:
                    raise
                except Exception as error:
                    # Libraries wrap what their collectives raise, or report what others' have raised.
                    if wrapped := _failure_behind(error):
                        raise type(wrapped)(*wrapped.args) from error
                    if self.session.member.newer_than(self.runtime.generation):
                        raise Superseded("a newer generation exists") from error
                    raise

        result = self.recovery.together(guarded)
        self.refresh()
        return result

    def refresh(self) -> None:
        """Update Megatron's list of model chunks to this worker's blocks, which a recovery may have changed. The list
        is never empty, as Megatron's loop looks at its first element.
        """
        blocks = self.model.holdings.chunks
        chunks = [block.model for block in blocks] or [self._empty_chunk]
        if chunks != self.chunks:
            for block in blocks:
                checkpoint.prepare(self.model.holdings, block)
            self.chunks[:] = chunks

    def leave_start(self) -> None:
        """Begin training: from now on what Megatron does with all ranks is common work, too."""
        arguments.quiet_rebuilding()
        logging.getLogger("megatron.core.utils").addFilter(_is_no_loss)
        self.groups.leave_first(self.together)

    @functools.cached_property
    def _empty_chunk(self) -> Any:
        return empty_chunk(self.model.spec, self.groups.of_cell)


def _is_no_loss(record: logging.LogRecord) -> bool:
    """Whether a log record is not about the loss of another rank. Megatron warns, with stack lines, of anything that
    ends a forward (core_v0.16.1 utils.py, ``StragglerDetector``). A lost rank would look like a crash there, and is
    reported anyway.
    """
    return _failure_behind(sys.exc_info()[1]) is None


def _failure_behind(error: BaseException | None) -> Superseded | PeerFailed | None:
    """The failure of another rank that made ``error`` be raised; None if it was not one."""
    while error is not None:
        if isinstance(error, Superseded | PeerFailed):
            return error
        error = error.__cause__ or error.__context__
    return None
