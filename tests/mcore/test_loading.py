"""A checkpoint that cannot be loaded is bad input; what ails a rank or its peers is not."""

from __future__ import annotations

import argparse
import errno
import json

import pytest

torch = pytest.importorskip("torch")

from odyssey_megatron.errors import ConfigError, PeerFailed  # noqa: E402
from odyssey_megatron.mcore.loop import loading  # noqa: E402
from odyssey_megatron.mcore.loop.tracker import TRACKER  # noqa: E402
from tests.mcore.test_saving import cut_short, the_file, written  # noqa: E402


def archive(path, change):
    torch.save({"args": list(range(1000))}, path)
    path.write_bytes(change(path.read_bytes()))
    torch.load(path, weights_only=True)


DAMAGE = {
    "cut-in-the-middle": lambda path: archive(path, lambda text: text[: len(text) // 2]),
    "cut-at-the-end": lambda path: archive(path, lambda text: text[:-10]),
    "empty": lambda path: archive(path, lambda text: b""),
    "overwritten": lambda path: archive(path, lambda text: b"garbage" * 50),
    "no-json": lambda path: json.loads("{"),
    "no-text": lambda path: b"\xff6".decode(),
    "a-folder": lambda path: path.parent.read_bytes(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_bad_input(tmp_path, damage):
    with (
        pytest.raises(ConfigError, match="no checkpoint can be loaded from saved: "),
        loading.refused("saved"),
    ):
        DAMAGE[damage](tmp_path / "common.pt")


def test_the_file_that_is_damaged_is_named(tmp_path):
    """Torch says EOFError, no more."""
    folder = written(tmp_path / "iter_0000002")
    cut_short(the_file(folder))
    (tmp_path / TRACKER).write_text("2")
    args = argparse.Namespace(ckpt_step=None)
    with (
        pytest.raises(
            ConfigError,
            match=r"saved: EOFError\. In .*iter_0000002: __0_0.distcp has \d+ bytes of \d+\. Name",
        ),
        loading.refused("saved", lambda: loading.named(str(tmp_path), args)),
    ):
        raise EOFError


@pytest.mark.parametrize(
    "failure", [SystemExit(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")]
)
def test_one_that_cannot_be_loaded_by_is_to_be_mended_and_whole_checkpoints_are_named(tmp_path, failure):
    """--ckpt-step alone does not help: Megatron reads the file first."""
    (tmp_path / TRACKER).write_bytes(b"\xff")
    for iteration in (2, 4, 6, 8, 10):
        written(tmp_path / f"iter_{iteration:07d}")
    cut_short(the_file(tmp_path / "iter_0000010"))
    with pytest.raises(ConfigError) as raised, loading.refused(str(tmp_path)):
        raise failure
    said = str(raised.value)
    assert (
        f"{TRACKER} names no checkpoint: it holds b'\\xff'. Write the number of one into that file; or remove"
        in said
    )
    assert said.endswith(f"Undamaged in {tmp_path}: iter_0000008, iter_0000006, iter_0000004.")


@pytest.mark.parametrize("what", ["cut short", "gone"])
def test_whole_checkpoints_beside_one_that_cannot_be_loaded_are_named(tmp_path, what):
    for iteration in (2, 4):
        written(tmp_path / f"iter_{iteration:07d}")
    if what == "cut short":
        cut_short(the_file(tmp_path / "iter_0000004"))
    (tmp_path / TRACKER).write_text("4" if what == "cut short" else "6")
    args, whole = (
        argparse.Namespace(ckpt_step=None),
        {"cut short": "iter_0000002", "gone": "iter_0000004, iter_0000002"},
    )
    with (
        pytest.raises(ConfigError, match=rf"\. Undamaged in {tmp_path}: {whole[what]}\. Name another one by"),
        loading.refused("saved", lambda: loading.named(str(tmp_path), args)),
    ):
        raise EOFError


def test_a_checkpoint_of_another_version_is_said_to_be_one(tmp_path, monkeypatch):
    import megatron.core

    newer = type("Newer", (), {"__module__": "megatron.core"})
    monkeypatch.setattr(megatron.core, "Newer", newer, raising=False)
    torch.save(newer(), tmp_path / "common.pt")
    why = "saved by another version of Megatron-LM, which has megatron.core.Newer. "
    with pytest.raises(ConfigError, match=why) as raised, loading.refused("saved"):
        torch.load(tmp_path / "common.pt", weights_only=True)
    assert "weights_only" not in str(raised.value)


def test_a_checkpoint_without_its_common_file_is_bad_input(tmp_path):
    """megatron-core 0.16.1 fails while it reports that."""
    from megatron.core import dist_checkpointing

    backends = {f"{one}_backend_version": 1 for one in ("sharded", "common")}
    backends |= {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (tmp_path / "metadata.json").write_text(json.dumps(backends))
    with pytest.raises(ConfigError, match="No such file .*common.pt"), loading.refused("saved"):
        dist_checkpointing.load_common_state_dict(str(tmp_path))


def test_an_error_of_megatrons_own_is_none_of_a_checkpoint():
    with pytest.raises(AttributeError), loading.refused("saved"):
        raise AttributeError("'str' object has no attribute 'iterdir'")


def test_flags_that_megatron_finds_at_odds_with_it_are_bad_input():
    why = "class input value 32 and checkpointvalue 24 for total number of iterations do not match"
    with pytest.raises(ConfigError, match=why), loading.refused("saved"):
        raise AssertionError(f"OptimizerParamScheduler: {why}")


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "disk"), RuntimeError("[gloo] Connection closed by peer"), PeerFailed("rank 1")],
)
def test_a_failing_disk_and_a_lost_peer_are_none(error):
    with pytest.raises(type(error)) as raised, loading.refused("saved"):
        raise error
    assert raised.value is error


def test_a_strict_load_asks_for_no_state_that_is_never_loaded():
    from megatron.core.dist_checkpointing import validation

    report = validation.maybe_report_missing_and_unexpected_keys
    buffers = "optimizer.distributed.dp_group_idx_1"
    never = {"rng_state", "rerun_state_machine_state", f"{buffers}.per_bucket_numel", f"{buffers}.optimizer"}
    never |= {f"chained_1.{buffers}.per_bucket_numel_unpadded"}
    loading.report_keys(report, never, set(), True)
    with pytest.raises(loading.CheckpointingException, match="Missing keys .*: {'weight'}. $"):
        loading.report_keys(report, never | {"weight"}, set(), True)
    with pytest.raises(loading.CheckpointingException, match="Unexpected keys .*: {'rng_state'}. $"):
        loading.report_keys(report, set(), {"rng_state"}, True)
