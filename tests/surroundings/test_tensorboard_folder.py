"""TensorBoard's folder is full, or does not answer: curves wait, or lose points, and training does not."""

from __future__ import annotations

import os
import time

import pytest

from odyssey_megatron.mcore.loop.tensorboard import SurvivingWriter, open_writer

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

LONG = "x" * 3000
"""Of a tag: a few points are more than the last page of a file has room for."""


def writer_in(folder):
    notes = []
    writer = SurvivingWriter(
        lambda: open_writer(str(folder), 10), notes.append, lambda: (notes or [-1])[-1], name="the curves"
    )
    writer.become_last()
    return writer


def train(writer, iterations) -> float:
    """The longest that an iteration waited (seconds)."""
    longest_s = 0.0
    for iteration in iterations:
        began_s = time.monotonic()
        writer.begin(iteration)
        writer.add_scalar(LONG, iteration / 2, iteration)
        longest_s = max(longest_s, time.monotonic() - began_s)
    return longest_s


def points(folder):
    found = {}
    for path in sorted(folder.glob("events*")):
        events = accumulators.EventAccumulator(str(path)).Reload()
        if LONG in events.Tags()["scalars"]:
            found.update({one.step: one.value for one in events.Scalars(LONG)})
    return found


def test_a_disk_that_fills_up_and_has_room_again(disk, capsys):
    writer = writer_in(disk.path)
    train(writer, range(5))
    disk.fill()
    assert train(writer, range(5, 15)) < 1.0
    assert capsys.readouterr().err.count("the curves cannot be written (No space left on device)") == 1
    disk.free()
    time.sleep(1.5)
    assert train(writer, range(15, 20)) < 1.0
    writer.close()
    assert "the curves is written again; 0 line(s) were lost" in capsys.readouterr().err
    assert points(disk.path) == {iteration: iteration / 2 for iteration in range(20)}


def test_a_disk_that_is_full_from_the_start_to_the_end(disk, capsys):
    disk.fill()
    writer = writer_in(disk.path)
    assert train(writer, range(10)) < 1.0
    writer.close()
    said = capsys.readouterr().err
    assert said.count("cannot be written (No space left on device)") == 1
    assert "the curves: 10 line(s) were lost" in said
    assert "Traceback" not in said


def test_a_folder_that_does_not_answer(tmp_path, capsys):
    """A pipe that nobody reads, where the folder is tried."""
    os.mkfifo(tmp_path / ".room")
    writer = writer_in(tmp_path)
    assert train(writer, range(10)) < 1.0
    began_s = time.monotonic()
    writer.close()
    assert time.monotonic() - began_s < 4.0
    assert "line(s) were lost" in capsys.readouterr().err
    os.close(os.open(tmp_path / ".room", os.O_RDWR | os.O_NONBLOCK))  # its thread may end
