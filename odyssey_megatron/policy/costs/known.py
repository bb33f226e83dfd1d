"""What a running job knows of its costs, from its start to its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from odyssey_megatron.codec import from_json
from odyssey_megatron.diagnosis.verdicts import Diagnosis
from odyssey_megatron.metrics.outlet import Outlet
from odyssey_megatron.plan.costs import Costs
from odyssey_megatron.policy.costs.history import History
from odyssey_megatron.policy.costs.measured import Measured, alike, with_measured
from odyssey_megatron.policy.costs.profile import Profile

_log = logging.getLogger(__name__)


class KnownCosts:
    """The profile of a running job, kept up to date with what the ranks measure."""

    def __init__(
        self,
        path: Path,
        given: Profile,
        cell_size: int,
        *,
        spreads_experts: bool = False,
        packs_sequences: bool = False,
    ):
        """Begin with the profile that the job was ``given``. What is measured will be saved to ``path``.

        Args:
            spreads_experts: Whether experts are spread over the ranks of a cell.
            packs_sequences: See ``JobSpec``.
        """
        self._path = path
        self.given = self.used = self.measured = given
        """As the job began; what decisions go by, which has been rehearsed; with all that was measured by now."""
        self._history = History(cell_size, spreads_experts=spreads_experts, packs_sequences=packs_sequences)
        self._diagnosed = Diagnosis(costs={})
        self._saved: Costs | None = None

    def without_memory_limit(self) -> None:
        """Take back the memory of a device, before anything is measured: the estimates do not fit it."""
        costs = replace(self.given.costs, memory_bytes=None)
        self.given = self.used = self.measured = replace(self.given, costs=costs)

    def without_messages(self) -> None:
        """Have plans keep no messages from now on (``policy/messages.py``)."""
        self.given = self.given.without_messages
        self.used, self.measured = self.used.without_messages, self.measured.without_messages

    def learn(
        self,
        published: Sequence[str],
        incarnations: Mapping[int, int] = MappingProxyType({}),
        nodes: Mapping[int, int] = MappingProxyType({}),
    ) -> Diagnosis:
        """Take in what ranks have ``published``, and return which workers and links are slow by now.

        Args:
            published: A text for each rank, "" if there is none yet.
            incarnations: Rank -> its present process, where known. Measurements of others are forgotten.
            nodes: Worker -> node. Without it there are no verdicts on links.
        """
        found: dict[int, Measured] = {}
        for rank, text in enumerate(published):
            try:
                found |= {rank: from_json(Measured, text)} if text else {}
            except ValueError as error:
                _log.warning("a rank's measurements are left out: %s", error)
        history = self._history.with_published(found, incarnations)
        diagnosis = history.diagnosis(self._diagnosed, self.used.costs, nodes)
        self._history, self._diagnosed = history, diagnosis
        self.measured = with_measured(self.given, found.values(), history.healthy(diagnosis))
        return diagnosis

    def newest(self) -> Profile:
        """Return the newest profile. If its costs are like those that decisions were rehearsed with, it keeps these."""
        found, known = self.measured, self.used
        return replace(known, group_build_s=found.group_build_s) if alike(found.costs, known.costs) else found

    def adopt(self, published: Sequence[str]) -> None:
        """Have decisions go by what ranks have ``published``, without having rehearsed them."""
        self.learn(published)
        self.used = self.measured

    def keep(self) -> None:
        """Save what was measured by now, if there is anything new."""
        profile = self.newest()
        if profile.source == "measured" and profile.costs is not self._saved:
            self._saved = profile.costs
            self._outlet.put(lambda: profile, 1)

    def finish(self, published: Sequence[str]) -> None:
        """Save what the ranks have ``published`` at the job's end."""

        def newest() -> Profile:
            self.learn(published)
            return self.measured

        self._outlet.put(newest, 1)
        self._outlet.close()

    @cached_property
    def _outlet(self) -> Outlet[Callable[[], Profile]]:
        return Outlet(lambda found: found().save(self._path), name=f"the profile {self._path}")
