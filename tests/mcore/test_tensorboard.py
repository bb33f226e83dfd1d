"""Nothing that was logged is lost with the rank that wrote it."""

from __future__ import annotations

import pytest

from odyssey_megatron.mcore.loop.tensorboard import SurvivingWriter


class File:
    """A writer whose buffer is lost unless it is flushed."""

    def __init__(self):
        self.buffer, self.written = [], []

    def add_scalar(self, *scalar):
        self.buffer.append(scalar)

    def flush(self):
        self.written += self.buffer
        self.buffer = []


@pytest.mark.parametrize("died_after", ["its last flush", "noting it", "beginning the next iteration"])
def test_what_was_not_flushed_is_written_by_the_next(died_after):
    notes, files = [], [File(), File()]
    first, second = (
        SurvivingWriter(lambda file=file: file, notes.append, lambda: (notes or [-1])[-1]) for file in files
    )
    first.become_last()
    for iteration in range(3):
        for one in (first, second):
            one.begin(iteration)
            one.add_scalar("loss", iteration / 2, iteration)
    if died_after != "its last flush":
        first.begin(3)
        second.begin(3)
    if died_after == "beginning the next iteration":
        first.add_scalar("loss", 1.5, 3)
        second.add_scalar("loss", 1.5, 3)
    second.become_last()
    second.add_scalar("loss", 9.0, 9)
    second.flush()
    steps = [step for _, _, step in files[0].written + files[1].written]
    expected = [0, 1, 2, 3, 9] if died_after == "beginning the next iteration" else [0, 1, 2, 9]
    assert steps == expected
