from __future__ import annotations

import io
import json
import re
import shutil

import matplotlib.image
import pytest

from odyssey_megatron import cli
from odyssey_megatron.errors import EXIT_UNSOUND
from odyssey_megatron.metrics.follow import Follower
from odyssey_megatron.metrics.journal import Journal, read_journal
from odyssey_megatron.metrics.suspects import suspects
from odyssey_megatron.metrics.timeline import last_job

from .synthetic_run import JOB, STEPS


def main(argv):
    return cli.main(["report", *argv])


@pytest.fixture(scope="module")
def report(runs, tmp_path_factory):
    """The folder of a report on the run that was shot at."""
    out = tmp_path_factory.mktemp("report") / "new"
    assert main([str(runs["shot_at"]), "--reference", str(runs["undisturbed"]), "--out", str(out)]) == 0
    return out


def test_the_pictures_are_pictures(report):
    names = {path.name for path in report.glob("*.png")}
    assert names == {"loss.png", "step_time.png", "schedule_1.png", "schedule_3.png"}
    for path in report.glob("*.png"):
        pixels = matplotlib.image.imread(io.BytesIO(path.read_bytes()))
        assert pixels.shape[0] > 300
        assert pixels.shape[1] > 1000
        assert pixels.std() > 0.02, f"{path.name} is blank"


def test_the_page_is_self_contained_and_has_the_numbers(report):
    page = (report / "index.html").read_text()
    assert not re.search(r'(src|href|srcset)="(?!data:)', page)
    assert "http" not in page
    assert page.count("<picture>") == 4
    for text in ("rank 5", "superseded", "rejected: worker 4 would need 210 MiB", "exactly once", "2e-13"):
        assert text in page


def test_the_json_is_the_summary(runs, report, capsys):
    assert main([str(runs["shot_at"]), "--reference", str(runs["undisturbed"]), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got == json.loads((report / "summary.json").read_text())
    assert (got["steps"], got["world_size"], got["verdict"]) == (STEPS, 8, "trained")
    assert [row["dead"] for row in got["recoveries"]] == [[5], [0], [3]]
    assert got["samples"]["ok"] is True
    assert got["loss_difference"]["max_relative"] == pytest.approx(2e-13, rel=0.01)


def test_the_terminal_gets_the_table_and_the_path(runs, capsys, tmp_path):
    assert main([str(runs["undisturbed"]), "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "nothing failed" in text
    assert "<p>None: nothing failed.</p>" in (tmp_path / "index.html").read_text()
    assert text.rstrip().endswith(f"report: {tmp_path / 'index.html'}")


def test_a_loss_that_ended_the_job_is_no_recovery_and_not_nothing(runs, capsys, tmp_path):
    folder = shutil.copytree(runs["undisturbed"], tmp_path / "run")
    journal = Journal(folder, source="agent0", job=JOB)
    journal.event("failure_detected", generation=1, dead=[3, 5], code=-9, cause="killed")
    journal.close()
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "no recoveries: rank(s) 3, 5 were lost, and nobody went on" in capsys.readouterr().out
    page = (tmp_path / "out" / "index.html").read_text()
    assert "None: rank(s) 3, 5 were lost, and nobody went on." in page
    assert re.search(r"<b>2</b><span>rank\(s\) lost", page)


def test_ranks_that_ended_with_the_job_were_not_lost(runs, capsys, tmp_path):
    """As where gradients are not finite. Nor is their machine suspected, or that of a rank that makes room."""
    folder = shutil.copytree(runs["undisturbed"], tmp_path / "run")
    journal = Journal(folder, source="agent0", job=JOB)
    journal.event(
        "failure_detected",
        generation=1,
        dead=[3, 5, 6],
        code=[EXIT_UNSOUND, -9, -9],
        cause="exit",
        causes=["exit", "killed", "moved"],
    )
    journal.close()
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "no recoveries: rank(s) 5, 6 were lost, and nobody went on" in capsys.readouterr().out
    (found,) = suspects(last_job(list(read_journal(folder))))
    (lost,) = [one for one in found.evidence if " lost in " in one]
    assert lost.startswith("rank(s) 5 lost")


def test_a_folder_that_is_used_again_reports_on_the_latest_job(runs, tmp_path, capsys):
    shutil.copytree(runs["shot_at"], tmp_path / "run")
    for path in (runs["undisturbed"] / "journal").iterdir():
        later = path.read_text().replace(JOB, "0f" * 4)
        if path.stem == "rank3":  # of a host whose clock is behind, or was set back
            later = re.sub(r'"wall_s":1(?=\d{9}\.)', '"wall_s":0', later)
        with (tmp_path / "run" / "journal" / path.name).open("a") as file:
            file.write(later)
    assert main([str(tmp_path / "run"), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["steps"], got["recoveries"], got["samples"]["ok"]) == (STEPS, [], True)


def test_faults_that_did_not_strike_are_named(runs, capsys, tmp_path):
    """In the summary, on the page and as JSON. Journals that do not say what was injected have none."""
    folder = shutil.copytree(runs["undisturbed"], tmp_path / "run")
    agent0, left = folder / "journal" / "agent0.jsonl", "rank=1,step=<9>,at=evaluate"
    told = f'"inject":"rank=2,step=3,slow=2; {left}","world_size"'
    agent0.write_text(agent0.read_text().replace('"world_size"', told, 1))
    rank2 = Journal(folder, source="rank2", rank=2, job=JOB)
    rank2.event("slowed", step=3, slow=2.0, faults=(0,))
    rank2.close()
    by_later_processes(capsys, folder, tmp_path / "later", left)
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    line = f"no record that 1 fault(s) struck, so this job does not show that it survives them: {left}\n"
    assert line in capsys.readouterr().out
    assert "rank=1,step=&lt;9&gt;,at=evaluate." in (tmp_path / "out" / "index.html").read_text()
    for run, faults in ((folder, [left]), (runs["shot_at"], [])):
        assert main([str(run), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["faults_not_struck"] == faults


def by_later_processes(capsys, run, folder, fault):
    """A fault is of the rank's first process, if it names no other."""
    agent1 = Journal(shutil.copytree(run, folder), source="agent1", job=JOB)
    agent1.event("rank_started", target=1, pid=1, host="host0")
    agent1.close()
    assert main([str(folder)]) == 0
    assert (
        f"{fault}. Rank(s) 1 had later processes, which a fault strikes only where" in capsys.readouterr().out
    )


def test_a_checkpoint_that_is_missing_is_named(runs, capsys, tmp_path):
    """In the summary, on the page and as JSON."""
    folder = shutil.copytree(runs["undisturbed"], tmp_path / "run")
    rank0 = Journal(folder, source="rank0", rank=0, job=JOB)
    rank0.event("not_saved", step=STEPS, why="no space <left>")
    rank0.close()
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 0
    line = f"the checkpoint of iteration {STEPS} was not saved: no space <left>"
    assert f"{line}\n" in capsys.readouterr().out
    assert "was not saved: no space &lt;left&gt;" in (tmp_path / "out" / "index.html").read_text()
    for run, text in ((folder, line), (runs["shot_at"], "")):
        assert main([str(run), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["not_saved"] == text


def test_lines_that_are_no_events_are_named_and_left_out(runs, tmp_path, capsys):
    """By who follows the job, too."""
    broken = tmp_path / "broken"
    shutil.copytree(runs["undisturbed"], broken)
    rank0 = broken / "journal" / "rank0.jsonl"
    rank0.write_text(
        '{"event": "samples", "wall_s": 1e12}\n[1]\n{"schema_version": "x"}\n' + rank0.read_text()
    )
    assert main([str(broken), "--json"]) == 0
    captured = capsys.readouterr()
    assert "rank0.jsonl, line 1 and 2 more: it is no event of a journal" in captured.err
    assert captured.err.count("\n") == 1
    assert main([str(runs["undisturbed"]), "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    got = json.loads(captured.out)
    assert len(got["lines_left_out"]) == 1
    assert got == {**whole, "run": "broken", "lines_left_out": got["lines_left_out"]}
    assert Follower(broken).events() == Follower(runs["undisturbed"]).events()


def test_a_part_of_a_journal_does_not_say_that_nothing_failed(runs, tmp_path, capsys):
    """That of a node with a folder of its own, or what was written after the folder was deleted."""
    part = tmp_path / "part"
    shutil.copytree(runs["shot_at"], part)
    (part / "journal" / "agent0.jsonl").unlink()
    assert main([str(part)]) == 0
    told = capsys.readouterr()
    assert "lacks the journal of the job's host, or its beginning" in told.err
    assert "nothing failed" not in told.out


@pytest.mark.parametrize(
    ("observes", "ends", "why"),
    [
        (False, True, "the job ended before its first step, so there is nothing to report"),
        (False, False, "the job has not come to its first step yet, or was killed before it"),
        (True, True, "with --odyssey observe steps are in the job's output alone"),
        (True, False, "with --odyssey observe steps are in the job's output alone"),
    ],
)
def test_why_a_journal_has_no_step(tmp_path, capsys, observes, ends, why):
    journal = Journal(tmp_path, source="agent0")
    journal.event("job_started", world_size=2, nodes=1, **({"observes": True} if observes else {}))
    if ends:
        journal.event("job_finished", verdict="done", exit_code=0)
    assert main([str(tmp_path)]) == 2
    assert why in capsys.readouterr().err


def test_bad_input_is_one_paragraph_and_exit_code_2(runs, tmp_path, capsys):
    Journal(tmp_path / "empty", source="agent0").event("job_started", world_size=2, nodes=[0, 0])
    for folder, reason in ((tmp_path / "none", "has no journal"), (tmp_path / "empty", "no committed step")):
        assert main([str(folder)]) == 2
        error = capsys.readouterr().err
        assert reason in error
        assert error.count("\n") == 1
    assert main([str(runs["undisturbed"]), "--out", "/proc/nowhere"]) == 2
    assert "cannot write" in capsys.readouterr().err
