"""A tracker file that names no checkpoint ends no job in mid-training."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from odyssey_megatron.errors import ConfigError
from odyssey_megatron.mcore.loop import saving
from odyssey_megatron.mcore.loop.tracker import TRACKER, fault, tracked
from tests.mcore.test_saving import args_of, names, written

NO_NAMES = {
    b"": "it is empty",
    b"\xff\xfe\0": r"it holds b'\xff\xfe\x00'",
    b"4\0\0": r"it holds b'4\x00\x00'",
}


def of_a_job(folder, **given):
    return args_of(save=str(folder), rank=0, **given)


@pytest.mark.parametrize(("text", "name"), [(b"7\n", "iter_0000007"), (b"release", "release")])
def test_a_tracker_file_names_an_iteration_or_converted_weights(tmp_path, text, name):
    assert (tracked(tmp_path), fault(tmp_path)) == ("", ""), "there is none"
    (tmp_path / TRACKER).write_bytes(text)
    assert (tracked(tmp_path), fault(tmp_path)) == (name, "")


@pytest.mark.parametrize("text", NO_NAMES)
def test_one_that_names_nothing_is_said_and_the_job_saves(tmp_path, capfd, text):
    (tmp_path / TRACKER).write_bytes(text)
    written(tmp_path / "iter_0000002")
    saving.check(of_a_job(tmp_path), joins=False)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert (
        f"in {tmp_path}, to which checkpoints are to be saved, {TRACKER} names no checkpoint: {NO_NAMES[text]}"
        in said
    )
    saving.check(of_a_job(tmp_path), joins=True)
    saving.check(args_of(save=str(tmp_path), rank=1), joins=False)
    assert not capfd.readouterr().err, "once, on one rank, and not while the job runs"
    saving._sweep(tmp_path / "iter_0000004")
    assert names(tmp_path) == ["iter_0000002", TRACKER]


@pytest.mark.parametrize("kind", ["persistent", "non-persistent"])
@pytest.mark.parametrize("text", [b"release", *NO_NAMES])
def test_with_checkpoints_to_retain_one_without_a_number_is_refused(tmp_path, monkeypatch, text, kind):
    """Megatron reads it behind the save of the first one, and fails."""
    checkpointing = SimpleNamespace(_NON_PERSISTENT_CKPT_SUBDIR="non_persistent")
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(checkpointing=checkpointing))
    args, folder = of_a_job(tmp_path, save_retain_interval=4), tmp_path
    saving.check(args, joins=False)
    if kind == "non-persistent":
        args.non_persistent_ckpt_type, folder = "global", tmp_path / "non_persistent"
        folder.mkdir()
    (folder / TRACKER).write_bytes(text)
    mend = "Save to another folder" if text == b"release" else "Write the number of an iter_"
    with pytest.raises(ConfigError, match=f"in {folder}, to which .* --save-retain-interval .* {mend}"):
        saving.check(args, joins=False)
    saving.check(args, joins=True)
    (folder / TRACKER).write_text("2")
    saving.check(args, joins=False)
