"""The programs of all workers, those of equal pipelines written once."""

from __future__ import annotations

from dataclasses import dataclass


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
        """The program of ``worker``; empty if it has none."""
        for numbers, seats in self.groups:
            for one, template in seats:
                if one == worker:
                    return self.templates[template].format(*numbers)
        return ""

    def text(self) -> str:
        """As ``Schedule.to_text()``, ascending by worker."""
        lines = [
            (worker, self.templates[template].format(*numbers))
            for numbers, seats in self.groups
            for worker, template in seats
        ]
        return "\n".join(f"{worker}: {program}" for worker, program in sorted(lines))
