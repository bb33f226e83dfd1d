"""Megatron's groups in this process, which always stand for the living ranks.

Until training begins they contain all ranks of the job, or, in a process that joins, its cell alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.distributed import ProcessGroup

from odyssey_megatron.cluster.cell import Cell
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.mcore.loop.joining import starting_groups
from odyssey_megatron.mcore.model import groups
from odyssey_megatron.mcore.plugin import Session
from odyssey_megatron.plan.placing.groups import WORLD
from odyssey_megatron.rebuild.world import Together


class LivingGroups:
    """The groups of one rank: its cell's, and the default group."""

    def __init__(self, session: Session, cell: Cell, config: OdysseyConfig):
        self._own = groups.OwnCell(cell, session.world_size, config.device, data_parallel=True)
        self.world, self.cell, self.of_cell = self._own.living, self._own.cell, self._own.groups
        self._built, self._first = starting_groups(session.member, cell, config)
        self._newest: Mapping[str, ProcessGroup] = {}
        self.are_first = True
        """Whether training has not begun here yet: what Megatron does with all ranks is then no common work of the
        job's.
        """
        self.mean_first()

    def mean(self, named: Mapping[str, ProcessGroup]) -> None:
        """Stand for the groups of a new generation from now on, given by name."""
        self._newest = named
        self._follow(named)

    def mean_first(self) -> None:
        """Stand for the groups of the start again, whatever generations there have been: this process joins."""
        self._follow(self._first)

    def mean_newest(self) -> None:
        self._follow(self._newest)

    def leave_first(self, together: Together) -> None:
        """From now on treat what Megatron does with all ranks as common work of the job."""
        self._built.close()
        self.are_first = False
        self.world.repeat_with(together)

    def _follow(self, named: Mapping[str, ProcessGroup]) -> None:
        self.world.follow(named[WORLD])
        self._own.follow(named)
