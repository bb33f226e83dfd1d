"""What the soak (``soak.py``) looks with."""

from __future__ import annotations

import json
import os
import shutil
import socket

from odyssey_megatron.metrics.outlet import Lines
from tests.e2e.around import left_behind, listening
from tests.e2e.soak import Tail, printed_difference, twice_or_not


def test_nothing_is_lost_of_a_journal_whose_folder_is_deleted(tmp_path):
    run_dir, kept = tmp_path / "run", tmp_path / "seen"
    tail, written = Tail(run_dir, kept), Lines(run_dir / "journal" / "rank0.jsonl")

    def write(step: int) -> None:
        written.write(json.dumps({"event": "step_committed", "wall_s": step, "step": step}).encode() + b"\n")

    def seen() -> list[int]:
        return [event["step"] for event in tail.more()]

    write(0)
    assert seen() == [0]
    write(1)
    shutil.rmtree(run_dir)
    write(2)
    assert seen() == [0, 1, 2]
    shutil.rmtree(run_dir)
    assert seen() == [0, 1, 2]
    write(3)
    with (run_dir / "journal" / "rank0.jsonl").open("ab") as torn:
        torn.write(b'{"event":"step_co')
    assert seen() == [0, 1, 2, 3]
    lines = (kept / "journal" / "rank0.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_the_ports_that_a_process_listens_on():
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = {one.getsockname()[1], other.getsockname()[1]}
        with socket.create_connection(one.getsockname()) as line:
            found = set(listening(os.getpid()))
            assert ports <= found
            assert line.getsockname()[1] not in found


def test_iterations_and_losses_as_printed():
    printed = {1: [5.0], 2: [4.0, 4.0], 4: [3.0]}
    assert twice_or_not(printed, 4) == 2
    assert printed_difference({1: [5.0]}, {1: [4.0]}) == 0.25
    assert printed_difference({1: [5.0]}, {}) == float("inf")
    assert printed_difference({}, {}) == float("inf")


def test_what_is_left_behind(tmp_path):
    (tmp_path / "torchinductor_root").mkdir()
    assert left_behind({os.getpid()}, tmp_path) == []
    (tmp_path / "torchelastic_x").mkdir()
    assert left_behind(set(), tmp_path) == [str(tmp_path / "torchelastic_x")]
