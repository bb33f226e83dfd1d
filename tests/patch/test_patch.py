"""``odyssey patch`` on a small tree with Megatron-LM's two files, and on the checkouts that are given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from odyssey_megatron import patch
from odyssey_megatron.cli import main
from odyssey_megatron.errors import ConfigError

CORE, TRAINING = "megatron/core/__init__.py", "megatron/training/__init__.py"
NEWEST = patch.supported()[-1]


@pytest.fixture
def tree(tmp_path):
    """Stands for a checkout of the newest tag: the lines that the anchors are, between others."""
    major, minor, number = NEWEST.version.split(".")
    files = {
        "megatron/core/package_info.py": f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {number}\nPRE_RELEASE = ''\n"
    }
    for insertion in NEWEST.insertions:
        files[insertion.file] = f"# above\n{insertion.anchor}\n" + ("" if insertion.after else "below = 1\n")
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def contents(tree):
    return {
        path.relative_to(tree): (path.read_bytes(), path.stat().st_mode)
        for path in sorted(tree.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }


def refused(capsys, *argv):
    """The one paragraph of a refusal."""
    assert main(["patch", *map(str, argv)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err


def rewrite(tree, name, before, after):
    path = tree / name
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("at_the_end", [True, False])
def test_uninstall_restores_every_byte(tree, ending, at_the_end):
    for name in (CORE, TRAINING):
        text = (tree / name).read_text().replace("\n", ending)
        (tree / name).write_bytes((text if at_the_end else text.removesuffix(ending)).encode())
        (tree / name).chmod(0o640)
    before = contents(tree)
    assert main(["patch", "install", str(tree)]) == 0
    installed = contents(tree)
    for name in (CORE, TRAINING):
        text, mode = installed[Path(name)]
        assert text != before[Path(name)][0]
        assert text.count(b"\n") == text.count(ending.encode())
        assert mode == before[Path(name)][1]
    assert main(["patch", "uninstall", str(tree)]) == 0
    assert contents(tree) == before


def test_files_keep_their_owner(tree, monkeypatch):
    """root patches a user's checkout, who must be able to edit it afterwards. Whoever may not give it away keeps it."""
    asked = []

    def refuse(descriptor, user, group):
        asked.append((user, group))
        raise PermissionError

    found = os.fstat
    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result([*found(file)[:4], 12345, *found(file)[5:]]))
    assert main(["patch", "install", str(tree)]) == 0
    owners = [((tree / name).stat().st_uid, (tree / name).stat().st_gid) for name in (CORE, TRAINING)]
    assert asked == owners


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_root_leaves_files_to_their_owner(tree):
    for name in (CORE, TRAINING):
        os.chown(tree / name, 12345, 54321)
    for action in ("install", "uninstall"):
        assert main(["patch", action, str(tree)]) == 0
        owners = [((tree / name).stat().st_uid, (tree / name).stat().st_gid) for name in (CORE, TRAINING)]
        assert owners == [(12345, 54321)] * 2


def test_twice_is_harmless(tree, capsys):
    before = contents(tree)
    assert main(["patch", "uninstall", str(tree)]) == 0
    assert contents(tree) == before
    assert main(["patch", "install", str(tree)]) == 0
    installed = contents(tree)
    assert main(["patch", "install", str(tree)]) == 0
    assert contents(tree) == installed
    assert "already" in capsys.readouterr().out
    assert main(["patch", "install", str(tree), "--dry-run"]) == 0
    said = capsys.readouterr()
    assert (said.out, "already" in said.err) == ("", True), "what reads the difference gets none"


def test_status(tree, capsys):
    def states():
        assert main(["patch", "status", str(tree)]) == 0
        return [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[1:]]

    assert states() == ["not installed"] * 2
    patch.write(patch.install(tree)[:1])
    assert states() == ["installed", "not installed"]
    patch.write(patch.install(tree))
    assert states() == ["installed"] * 2


def test_lines_are_found_whatever_the_version_has_become(tree, capsys):
    """An upgrade of the checkout leaves them where they are."""
    before = contents(tree)
    patch.write(patch.install(tree))
    info = "megatron/core/package_info.py"
    for digits, version in (
        ("1", "0.99.1, for which there is no patch"), ("int('1')", "of a version that cannot be read, for"),
    ):  # fmt: skip
        (tree / info).write_text(f"MAJOR = 0\nMINOR = 99\nPATCH = {digits}\n")
        assert main(["patch", "status", str(tree)]) == 0
        told = capsys.readouterr().out
        assert f"megatron-core {version}" in told
        assert told.count("installed; 'odyssey patch uninstall' takes it out") == 2
    assert "no version can be read from" in refused(capsys, "install", tree)
    assert main(["patch", "uninstall", str(tree)]) == 0
    assert [contents(tree)[Path(name)] for name in (CORE, TRAINING)] == [
        before[Path(name)] for name in (CORE, TRAINING)
    ]
    capsys.readouterr()
    assert main(["patch", "status", str(tree)]) == 0
    assert capsys.readouterr().out.count(": not installed\n") == 2


def test_status_says_which_line_of_the_file_was_edited(tree, capsys):
    patch.write(patch.install(tree))
    anchor = NEWEST.insertions[1].anchor
    rewrite(tree, TRAINING, anchor, f"{anchor}  # mine")
    assert main(["patch", "status", str(tree)]) == 0
    told = capsys.readouterr().out.splitlines()[2]
    assert f"{TRAINING}: installed; {TRAINING} is not as its tag has it" in told
    assert "put this line back as it was" in told
    assert "git checkout" not in told, "which would throw away what else was changed"


def test_a_dry_run_prints_what_git_applies_and_writes_nothing(tree, capfdbinary):
    (tree / TRAINING).write_bytes((tree / TRAINING).read_bytes().removesuffix(b"\n"))
    before = contents(tree)
    assert main(["patch", "install", str(tree), "--dry-run"]) == 0
    sys.stdout.flush()
    printed = capfdbinary.readouterr().out
    assert contents(tree) == before
    subprocess.run(["git", "apply", "-"], cwd=tree, input=printed, check=True)
    applied = contents(tree)
    assert applied != before
    assert patch.install(tree) == ()


def test_lines_of_an_older_odyssey_are_replaced_and_taken_out(tree, monkeypatch, tmp_path_factory):
    before = contents(tree)
    older = tmp_path_factory.mktemp("older") / "patches"
    shutil.copytree(patch.data(), older)
    (older / "lines.txt").write_text("import odyssey_megatron.older  # CALL\n")
    with monkeypatch.context() as context:
        context.setattr(patch, "data", lambda: older)
        patch.write(patch.install(tree))
    assert b"older" in (tree / CORE).read_bytes()
    assert patch.status(tree)[1].endswith("installed by another version")
    patch.write(patch.install(tree))
    assert b"older" not in (tree / CORE).read_bytes()
    patch.write(patch.uninstall(tree))
    assert contents(tree) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tree: rewrite(tree, TRAINING, NEWEST.insertions[1].anchor, "changed"),
            ["print_rank_last", "nowhere"],
        ),
        (lambda tree: rewrite(tree, CORE, "# above", NEWEST.insertions[0].anchor), ["lines 1, 2", "once"]),
        (
            lambda tree: rewrite(tree, "megatron/core/package_info.py", "MINOR = 1", "MINOR = 7"),
            ["0.79", "0.16.1"],
        ),
        (lambda tree: (tree / "megatron/core/package_info.py").unlink(), ["no Megatron-LM checkout"]),
        (lambda tree: (tree / TRAINING).unlink(), ["No such file"]),
        (
            lambda tree: rewrite(tree, CORE, "# above\n", "<<<<<<< HEAD\n=======\na = 1\n>>>>>>> theirs\n"),
            [CORE, "conflict", "lines 1, 4"],
        ),
    ],
    ids=["anchor gone", "anchor twice", "unknown version", "no checkout", "file gone", "conflict"],
)
def test_what_is_not_as_expected_is_refused_and_nothing_is_written(tree, capsys, change, said):
    change(tree)
    before = contents(tree)
    error = refused(capsys, "install", tree)
    assert not [text for text in said if text not in error], error
    assert contents(tree) == before


@pytest.mark.parametrize("action", ["install", "uninstall", "status"])
@pytest.mark.parametrize(
    ("old", "new"), [("import os", "import os  # mine"), ("# <<< odyssey", "# odyssey")], ids=["line", "mark"]
)
def test_edited_lines_of_ours_are_refused(tree, capsys, action, old, new):
    patch.write(patch.install(tree))
    rewrite(tree, CORE, old, new)
    before = contents(tree)
    assert "edited" in refused(capsys, action, tree)
    assert contents(tree) == before


def test_a_failing_write_leaves_all_files_as_they_were(tree, monkeypatch):
    before = contents(tree)
    replace, calls = os.replace, []

    def second_fails(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("disk on fire")
        replace(source, target)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(ConfigError, match="nothing was changed"):
        patch.write(patch.install(tree))
    assert contents(tree) == before, "no temporary file either"


def run_patched(tree, *flags, **env):
    """A process that imports the patched packages, with a stand-in for Odyssey that says what it was asked."""
    script = (
        "import megatron.core, megatron.training; print([n for n in vars(megatron.core) if 'odyssey' in n])"
    )
    return subprocess.run(
        [sys.executable, "-S", "-c", script, *flags],
        cwd=tree,
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def importable(tree):
    """The tree with contents that need no other package."""
    patch.write(patch.install(tree))
    for insertion in NEWEST.insertions:
        rewrite(tree, insertion.file, insertion.anchor, "")
    return tree


@pytest.mark.parametrize("flags", [[], ["--lr", "1", "odyssey"]])
def test_without_the_flag_a_patched_checkout_needs_no_odyssey(importable, flags):
    done = run_patched(importable, *flags)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("flags", "env"), [(["--odyssey"], {}), (["--odyssey-policy=auto"], {}), ([], {"ODYSSEY": "1"})]
)
def test_with_it_the_process_says_what_is_missing(importable, flags, env):
    done = run_patched(importable, *flags, **env)
    assert done.returncode == 2
    assert "No module named 'odyssey_megatron'" in done.stderr
    assert sys.executable in done.stderr
    assert done.stderr.count("\n") == 1


def test_with_it_both_calls_are_made_in_order(importable):
    stand_in = importable / "odyssey_megatron" / "mcore" / "autoload.py"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text("def before_megatron(): print('before')\n\ndef after_training(): print('after')\n")
    done = run_patched(importable, "--odyssey")
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\nafter\n[]\n", "")


def test_every_patch_calls_what_there_is():
    from odyssey_megatron.mcore import autoload

    for one in patch.supported():
        for insertion in one.insertions:
            (call,) = (line for line in insertion.lines if line.startswith("    autoload."))
            assert callable(getattr(autoload, call.strip().removeprefix("autoload.").removesuffix("()")))


def test_a_checkout_is_as_git_has_it_after_uninstall(any_megatron_lm, tmp_path):
    checkout = tmp_path / "checkout"
    for name in ("megatron/core/package_info.py", CORE, TRAINING):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(any_megatron_lm / name, checkout / name)
    subprocess.run("git init -q && git add . ", shell=True, cwd=checkout, check=True)

    def changed():
        command = ["git", "diff", "--name-only"]
        return subprocess.run(
            command, cwd=checkout, capture_output=True, text=True, check=True
        ).stdout.split()

    assert main(["patch", "install", str(checkout)]) == 0
    assert changed() == [CORE, TRAINING]
    for name in (CORE, TRAINING):
        compile((checkout / name).read_text(), name, "exec")
    lines = (checkout / CORE).read_text().splitlines()
    assert lines.index("_odyssey()") < next(
        i for i, line in enumerate(lines) if line.startswith(("import", "from"))
    )
    assert main(["patch", "uninstall", str(checkout)]) == 0
    assert changed() == []
