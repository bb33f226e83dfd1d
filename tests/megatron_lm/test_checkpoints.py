"""Megatron's checkpoints, saved under any layout, load under any other: with the plugin and without."""

from __future__ import annotations

import shutil

import pytest

from odyssey_megatron.errors import EXIT_BAD_INPUT, EXIT_NOT_SAVED
from odyssey_megatron.mcore.loop.saving import damage
from tests.launch.jobserver import CHECKOUT
from tests.megatron_lm.jobs import MOCK, assert_same_iterations, assert_same_lines, behind_a_load, checkpoint


@pytest.fixture(scope="session")
def saved_ragged(jobs):
    """A checkpoint of iteration 3, by three survivors of six ranks that hold three pipelines of two stages."""
    folder = jobs.folder / "saved-ragged"
    flags = f"{MOCK} --save {folder} --save-interval 3 --exit-interval 3 --odyssey-policy replan --ckpt-format torch"
    run = jobs.odyssey(
        "save-ragged", flags, ranks=6, stages=2,
        inject="rank=0,step=0,at=backward;rank=4,step=1,at=forward;rank=5,step=3,at=checkpoint",
    )  # fmt: skip
    assert run.exit_code == 0, run.log[-4000:]
    assert run.killed == [0, 4, 5]
    assert {event["at"] for event in run.named("injected")} == {"backward", "forward", "checkpoint"}
    assert (
        run.log.count("--ckpt-format changes nothing with --odyssey: checkpoints are saved as torch_dist")
        == 1
    )
    return folder


@pytest.fixture(scope="session")
def saved_plain(jobs):
    """The same iteration's, by plain Megatron-LM."""
    folder = jobs.folder / "saved-plain"
    jobs.plain(f"{MOCK} --save {folder} --save-interval 3 --exit-interval 3", ranks=6, stages=2)
    return folder


@pytest.fixture(scope="session")
def resumed(jobs, saved_plain):
    """Plain Megatron-LM from its own checkpoint on: what others are compared with."""
    run, whole = jobs.plain(f"{MOCK} --load {saved_plain}", ranks=6, stages=2), jobs.plain(ranks=6, stages=2)
    assert_same_iterations(run.iterations, behind_a_load(whole.iterations[3:]))
    return run


def test_saved_ragged_loads_into_plain_megatron_lm(jobs, saved_ragged, resumed):
    run = jobs.plain(f"{MOCK} --load {saved_ragged}", ranks=2, stages=2)
    assert_same_lines(run, resumed, first=4)


def test_saved_ragged_loads_into_another_layout(jobs, name, saved_ragged, resumed):
    run = jobs.odyssey(name, f"{MOCK} --load {saved_ragged}", ranks=4, stages=4)
    assert_same_lines(run, resumed, first=4)


def test_saved_plain_loads_and_survives(jobs, name, saved_plain, resumed):
    run = jobs.odyssey(
        name, f"{MOCK} --load {saved_plain}", ranks=4, stages=2, inject="rank=1,step=4,at=backward"
    )
    assert_same_lines(run, resumed, first=4)
    assert run.killed == [1]


@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer"])
def test_a_rank_that_holds_nothing_loads_it(jobs, name, saved_plain, resumed, more):
    """One was killed before anything was loaded, and of five ranks two pipelines of two stages leave one without."""
    inject = "rank=2,step=-1,at=groups,generation=1"
    run = jobs.odyssey(name, f"{MOCK} --load {saved_plain} {more}", ranks=6, stages=2, inject=inject)
    assert_same_lines(run, resumed, first=4)
    assert run.killed == [2], "the one without layers failed where Megatron had nothing to load"
    assert "Traceback" not in run.log


def test_a_checkpoint_of_files_of_ranks_is_refused_with_the_way_to_convert_it(jobs, name):
    folder = jobs.folder / name / "saved"
    saved = f"{MOCK} --ckpt-format torch --save {folder} --save-interval 1 --exit-interval 1"
    jobs.plain(saved, ranks=2, stages=2)
    load = f"{MOCK} --ckpt-format torch --load {folder}"
    run = jobs.odyssey(name, load, ranks=2, stages=2)
    assert run.exit_code == EXIT_BAD_INPUT
    assert run.log.count("--ckpt-convert-format torch_dist --ckpt-convert-save") == 1, run.log[-4000:]
    assert "Traceback" not in run.log
    converted = jobs.folder / name / "converted"
    convert = f"{load} --ckpt-convert-format torch_dist --ckpt-convert-save {converted}"
    jobs.plain_once(f"{name}-convert", convert, ranks=2, stages=2)
    going_on = f"{MOCK} --load {converted / 'torch_dist'}"
    run = jobs.odyssey(f"{name}-again", going_on, ranks=2, stages=2)
    assert_same_lines(run, jobs.plain(load, ranks=2, stages=2), first=2)


def test_a_strict_load_of_a_plain_checkpoint_goes_on(jobs, name, saved_plain, resumed):
    """Plain Megatron-LM saves the state of generators, which Odyssey does not load."""
    flags = f"{MOCK} --load {saved_plain} --dist-ckpt-strictness raise_all"
    assert_same_lines(jobs.odyssey(name, flags, ranks=4, stages=2), resumed, first=4)


def test_a_job_that_saves_weights_alone_goes_on_with_an_optimizers_state(jobs, name, saved_plain, resumed):
    folder = jobs.folder / name / "saved"
    flags = f"{MOCK} --load {saved_plain} --save {folder} --save-interval 6 --no-save-optim"
    assert_same_lines(jobs.odyssey(name, flags, ranks=4, stages=2), resumed, first=4)
    assert not [key for key in checkpoint(folder, 6) if "optimizer" in key]


TRACKER = "latest_checkpointed_iteration.txt"
UNUSABLE = {
    # what becomes of it; flags; what is said
    "no-number": (lambda folder: (folder / TRACKER).write_text(""), "", "no checkpoint: it is empty. Write the number"),
    "no-text": (
        lambda folder: (folder / TRACKER).write_bytes(b"\xff"), "--ckpt-step 3", "and name one by --ckpt-step"
    ),
    "no-file": (lambda folder: (folder / TRACKER).unlink(), "--exit-on-missing-checkpoint", "there is no checkpoint"),
    "no-such-folder": (lambda folder: (folder / TRACKER).write_text("7"), "", "iter_0000007"),
    "cut-short": (
        lambda folder: next(folder.glob("*/*.distcp")).write_bytes(b"x"), "", ".distcp has 1 bytes of "
    ),
    "no-common-file": (lambda folder: next(folder.glob("*/common.pt")).unlink(), "", "common.pt"),
    "of-another-model": (lambda folder: None, "--ffn-hidden-size 96", "Global shape mismatch"),
    "without-optimizer": (lambda folder: None, "--no-save-optim", "Begin with its weights alone: --no-load-optim"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_loaded_is_bad_input_and_no_rank_is_lost_for_it(jobs, name, saved_plain, case):
    """Where the latest file has no number, Megatron-LM leaves with exit code 0."""
    spoil, flags, said = UNUSABLE[case]
    folder = jobs.folder / f"{name}-saved"
    if case == "without-optimizer":
        saving = f"{MOCK} {flags} --save {folder} --save-interval 1 --exit-interval 1"
        assert jobs.odyssey(f"{name}-saving", saving, ranks=2, stages=2).exit_code == 0
    else:
        shutil.copytree(saved_plain, folder)
    spoil(folder)
    run = jobs.odyssey(name, f"{MOCK} {flags} --load {folder}", ranks=4, stages=2)
    assert run.exit_code == EXIT_BAD_INPUT, run.log[-4000:]
    assert run.log.count(said) == 1, run.log[-4000:]
    assert "Traceback" not in run.log
    assert run.named("recovered") == []


def test_a_checkpoint_is_loaded_by_its_number_alone(jobs, name, saved_plain, resumed):
    """As the message about a tracker file that names none advises."""
    folder = jobs.folder / f"{name}-saved"
    shutil.copytree(saved_plain, folder)
    (folder / TRACKER).unlink()
    run = jobs.odyssey(name, f"{MOCK} --load {folder} --ckpt-step 3", ranks=4, stages=2)
    assert_same_lines(run, resumed, first=4)


def test_a_tracker_file_without_a_number_ends_no_job_at_its_first_save(jobs, name):
    folder = jobs.folder / f"{name}-saved"
    folder.mkdir()
    (folder / TRACKER).write_bytes(b"\xff\xfe\0")
    flags = f"{MOCK} --save {folder} --save-interval 3"
    run = jobs.odyssey(f"{name}-refused", f"{flags} --save-retain-interval 6", ranks=2, stages=2)
    assert run.exit_code == EXIT_BAD_INPUT, run.log[-4000:]
    assert run.log.count("Megatron-LM reads the number of an iteration from it") == 1, run.log[-4000:]
    assert "Traceback" not in run.log
    run = jobs.odyssey(name, flags, ranks=2, stages=2)
    assert run.exit_code == 0, run.log[-4000:]
    assert run.log.count("names no checkpoint") == 1
    assert names(folder) == ["iter_0000003", "iter_0000006", TRACKER]
    assert (folder / TRACKER).read_text() == "6"


def test_a_rank_that_does_not_see_the_checkpoint_is_named_and_nobody_waits_for_it(jobs, name, saved_plain):
    before = [str(CHECKOUT / "tests" / "megatron_lm" / "elsewhere.py"), "2", str(jobs.folder / "nowhere")]
    run = jobs.odyssey(name, f"{MOCK} --load {saved_plain}", ranks=4, stages=2, before=before)
    assert run.exit_code == EXIT_BAD_INPUT, run.log[-4000:]
    assert "its latest file says 3 on rank 0, and nothing on rank(s) 2." in run.log


@pytest.mark.parametrize(
    ("iteration", "exit_code", "latest"), [(2, 0, "6"), (6, EXIT_NOT_SAVED, "4")], ids=["first", "last"]
)
def test_a_save_that_lacks_a_byte_is_said_and_training_goes_on(jobs, name, iteration, exit_code, latest):
    folder = jobs.folder / name / "saved"
    before = [str(CHECKOUT / "tests" / "megatron_lm" / "lossy.py"), str(iteration)]
    flags = f"{MOCK} --save {folder} --save-interval 2 --log-progress"
    run = jobs.odyssey(name, flags, ranks=4, stages=2, before=before)
    assert run.exit_code == exit_code, run.log[-4000:]
    assert run.log.count(f"THE CHECKPOINT OF ITERATION {iteration} WAS NOT SAVED") == 1
    has = "there is no checkpoint" if iteration == 2 else "iter_0000004 is still the latest checkpoint"
    assert f". In {folder} {has}, and " in run.log
    assert " are free.\n" in run.log, "what a full disk is known by"
    assert f"successfully saved checkpoint from iteration {iteration:7d}" not in run.log
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == latest
    saved = [2, 4, 6]
    saved.remove(iteration)
    assert sorted(one.name for one in folder.glob("*iter_*")) == [f"iter_{one:07d}" for one in saved]
    logged = (folder / "progress.txt").read_text()
    assert [one for one in (2, 4, 6) if f"Saved checkpoint\tIteration: {one}\t" in logged] == saved
    plain = jobs.plain(ranks=4, stages=2)
    assert_same_iterations(run.iterations, plain.iterations)


def test_only_the_checkpoints_to_retain_stay_and_the_last_one_that_is_not_persistent(jobs, name, resumed):
    """Ranks die as saves of both kinds begin; each save deletes an earlier one."""
    saved = jobs.folder / f"{name}-saved"
    folders = f"--save {saved} --save-interval 2 --save-retain-interval 4"
    passing = "--non-persistent-save-interval 3 --non-persistent-ckpt-type global"
    inject = "rank=0,step=2,at=checkpoint;rank=3,step=3,at=checkpoint;rank=5,step=4,at=checkpoint"
    run = jobs.odyssey(name, f"{MOCK} {folders} {passing}", ranks=6, stages=2, inject=inject)
    assert run.exit_code == 0, run.log[-4000:]
    assert run.killed == [0, 3, 5]
    tracker = "latest_checkpointed_iteration.txt"
    assert names(saved) == ["iter_0000004", "iter_0000006", tracker, "non_persistent"]
    assert names(saved / "non_persistent") == ["iter_0000003", tracker]
    for folder in (*saved.glob("iter_*"), saved / "non_persistent" / "iter_0000003"):
        assert not damage(folder)
    # Plain Megatron-LM takes the newest one of either kind.
    (saved / tracker).unlink()
    load = f"{MOCK} --load {saved} --non-persistent-ckpt-type global"
    assert_same_lines(jobs.plain(load, ranks=2, stages=2), resumed, first=4)


def names(folder):
    return sorted(one.name for one in folder.iterdir() if not one.name.startswith(".odyssey.lock-"))


def test_a_deletion_is_finished_by_others_and_nothing_else_is_deleted(jobs, name):
    """With --save-retain-interval; what stands there from earlier is of another format."""
    saved = jobs.folder / f"{name}-saved"
    other = saved / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"weights")
    flags = f"{MOCK} --save {saved} --save-interval 2 --save-retain-interval 4"
    before = [str(CHECKOUT / "tests" / "megatron_lm" / "deleting.py")]
    run = jobs.odyssey(name, flags, ranks=4, stages=2, before=before)
    assert_same_lines(run, jobs.plain(ranks=4, stages=2))
    assert run.killed == [0]
    left = ["iter_0000001", "iter_0000004", "iter_0000006", "latest_checkpointed_iteration.txt"]
    assert names(saved) == left
    assert other.read_bytes() == b"weights"
