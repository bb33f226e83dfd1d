"""The programs of all workers, in which those of equal pipelines are written only once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from odyssey_megatron.errors import ScheduleInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """The programs of all workers: for each a template, and the numbers that fill it."""

    templates: tuple[str, ...]
    """Programs in the text form of ``plan/schedule.py``; ``{i}`` is the i-th number of a worker's group."""
    groups: tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    """For each group of workers: its numbers (microbatches, then workers), and pairs (worker, its template)."""

    @classmethod
    def from_text(cls, text: str) -> Programs:
        """Return the programs of a whole schedule in its text form."""
        parted = [line.partition(":") for line in text.splitlines()]
        seats = tuple((int(worker), at) for at, (worker, _, _) in enumerate(parted))
        return cls(templates=tuple(program.strip() for _, _, program in parted), groups=(((), seats),))

    def of(self, worker: int) -> str:
        """Return the program of ``worker`` as text; empty if it has none.

        Raises:
            ScheduleInvalid: its template, or a number that this needs, is missing.
        """
        for numbers, seats in self.groups:
            for one, template in seats:
                if one == worker:
                    return self._filled(self._parted, template, list(map(str, numbers)))
        return ""

    def text(self) -> str:
        """Return all programs in the form of ``Schedule.to_text()``, ascending by worker. Raises as :meth:`of`."""
        lines, parted = [], cache(self._parted)
        for numbers, seats in self.groups:
            names = list(map(str, numbers))
            lines += [(worker, self._filled(parted, template, names)) for worker, template in seats]
        return "\n".join(f"{worker}: {program}" for worker, program in sorted(lines))

    def _parted(self, template: int) -> tuple[list[str], list[int]]:
        """Return a template's pieces of text, alternating with the names of its places; and the places as numbers."""
        if not 0 <= template < len(self.templates):
            raise ScheduleInvalid(f"template {template} of {len(self.templates)} is not there")
        pieces = _PLACE.split(self.templates[template])
        return pieces, list(map(int, pieces[1::2]))

    def _filled(
        self, parted: Callable[[int], tuple[list[str], list[int]]], template: int, numbers: Sequence[str]
    ) -> str:
        # Not by str.format, which could do more than filling with a text that came over the network.
        pieces, places = parted(template)
        filled = pieces.copy()
        try:
            filled[1::2] = [numbers[place] for place in places]
        except IndexError:
            raise ScheduleInvalid(f"template {template} wants more than {len(numbers)} numbers") from None
        return "".join(filled)


_PLACE = re.compile(r"\{(\d{1,9})\}")
