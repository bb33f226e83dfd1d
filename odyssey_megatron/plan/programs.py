"""The programs of all workers, those of equal pipelines written once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from odyssey_megatron.errors import ScheduleInvalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """For each worker a template and the numbers that it is filled with."""

    templates: tuple[str, ...]
    """Programs in the text form of ``plan/schedule.py``; ``{i}`` is the i-th number of a worker's group."""
    groups: tuple[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], ...]
    """Of each group of workers: its numbers (microbatches, workers), and (worker, template) of each."""

    @classmethod
    def from_text(cls, text: str) -> Programs:
        """Of a whole schedule's text form."""
        parted = [line.partition(":") for line in text.splitlines()]
        seats = tuple((int(worker), at) for at, (worker, _, _) in enumerate(parted))
        return cls(templates=tuple(program.strip() for _, _, program in parted), groups=(((), seats),))

    def of(self, worker: int) -> str:
        """The program of ``worker``; empty if it has none.

        Raises:
            ScheduleInvalid: a template, or a number that one wants, is not there.
        """
        for numbers, seats in self.groups:
            for one, template in seats:
                if one == worker:
                    return _Filler(self.templates).filled(template, list(map(str, numbers)))
        return ""

    def text(self) -> str:
        """As ``Schedule.to_text()``, ascending by worker. Raises as :meth:`of`."""
        lines, filler = [], _Filler(self.templates)
        for numbers, seats in self.groups:
            names = list(map(str, numbers))
            lines += [(worker, filler.filled(template, names)) for worker, template in seats]
        return "\n".join(f"{worker}: {program}" for worker, program in sorted(lines))


class _Filler:
    """Takes each template apart once, at the first worker that has it."""

    def __init__(self, templates: Sequence[str]):
        self._templates = templates
        self._parted: dict[int, tuple[list[str], list[int]]] = {}
        """Pieces and names of places in turn, and these places."""

    def filled(self, template: int, numbers: Sequence[str]) -> str:
        # Not by str.format, which would do more than it is asked for with a text that came over the network.
        if not 0 <= template < len(self._templates):
            raise ScheduleInvalid(f"template {template} of {len(self._templates)} is not there")
        if template not in self._parted:
            pieces = _PLACE.split(self._templates[template])
            self._parted[template] = pieces, list(map(int, pieces[1::2]))
        pieces, places = self._parted[template]
        try:
            pieces[1::2] = [numbers[place] for place in places]
        except IndexError:
            raise ScheduleInvalid(f"template {template} wants more than {len(numbers)} numbers") from None
        return "".join(pieces)


_PLACE = re.compile(r"\{(\d{1,9})\}")
