"""Forking from a preloaded process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from odyssey_megatron.errors import ConfigError, OdysseyError
from odyssey_megatron.launch.process.zygote import Zygote, prepare_environment
from tests.launch.jobserver import CHECKOUT, Job, wait_for
from tests.launch.test_survival import is_running


@pytest.fixture
def zygote():
    zygote = Zygote.spawn(["decimal"], {**os.environ, "PYTHONPATH": str(CHECKOUT)})
    yield zygote
    zygote.close()


def run(zygote, tmp_path, text, *arguments, **env):
    script = tmp_path / "script.py"
    script.write_text(text)
    out = tmp_path / "out"
    out.unlink(missing_ok=True)
    process = zygote.run(["-u", str(script), *arguments], env=env, stdout=str(out), stderr=str(out))
    return process, out


def test_a_script_sees_its_own_arguments_environment_and_modules(zygote, tmp_path):
    (tmp_path / "neighbour.py").write_text("NAME = 'next to the script'\n")
    text = (
        "import sys, os, neighbour\nprint(sys.argv[1:], sorted(k for k in os.environ if 'PID' not in k), __name__)\n"
        "print(neighbour.NAME, 'decimal' in sys.modules, os.getpgid(0) == os.getpid())\n"
    )
    process, out = run(zygote, tmp_path, text, "a", "-u", ONLY="this")
    assert process.wait(10) == 0, out.read_text()
    assert out.read_text().splitlines() == ["['a', '-u'] ['ONLY'] __main__", "next to the script True True"]


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('sorry')", 1, "sorry"),
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import atexit; atexit.register(lambda: print('bye'))", 0, "bye"),
        (
            "import threading, time; threading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()",
            0,
            "late",
        ),
    ],
)
def test_endings(zygote, tmp_path, text, code, shown):
    process, out = run(zygote, tmp_path, text)
    assert process.wait(10) == code
    assert shown in out.read_text()


def test_modules(zygote, tmp_path):
    process = zygote.run(
        ["-m", "json.tool", os.devnull], env=dict(os.environ), stdout=str(tmp_path / "out"), stderr=os.devnull
    )
    assert process.wait(10) == 1  # an empty file is not JSON


def test_a_process_that_cannot_be_started_ends_no_other(zygote, tmp_path):
    """The zygote's death would be that of all that it has forked."""
    other, out = run(zygote, tmp_path, "import time; print('runs'); time.sleep(60)")
    wait_for(lambda: out.exists() and out.read_text(), 10, "the script has been read")
    _, most = resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE, (3, most))
    with pytest.raises(OSError, match="Too many open files"):
        run(zygote, tmp_path, "pass")
    assert other.poll() is None
    resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE, (most, most))
    process, _ = run(zygote, tmp_path, "pass")
    assert process.wait(10) == 0
    assert other.poll() is None
    other.kill()


def test_none_begins_that_could_not_be_watched(tmp_path):
    """It would complain of the lack of files itself, before it is killed."""
    (tmp_path / "counting.py").write_text(
        f"import os\nforks = open({str(tmp_path / 'forks')!r}, 'wb', 0)\n"
        "os.register_at_fork(before=lambda: forks.write(b'.'))\n"
    )
    zygote = Zygote.spawn(["counting"], {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{tmp_path}"})
    soft, most = resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE, (3, most))
    with pytest.raises(OSError, match="Too many open files"):
        run(zygote, tmp_path, "pass")
    resource.prlimit(zygote.pid, resource.RLIMIT_NOFILE, (soft, most))
    assert run(zygote, tmp_path, "pass")[0].wait(10) == 0
    zygote.close()
    assert (tmp_path / "forks").read_text() == "."


def test_a_process_that_has_ended_keeps_its_pid_until_it_is_waited_for(zygote, tmp_path):
    process, _ = run(zygote, tmp_path, "pass")
    time.sleep(0.3)
    os.close(os.pidfd_open(process.pid))
    assert process.wait(10) == 0
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.pidfd_open(process.pid)


def test_waiting_with_a_limit(zygote, tmp_path):
    process, _ = run(zygote, tmp_path, "import time; time.sleep(30)")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL


def test_children_end_with_the_zygote(zygote, tmp_path):
    process, _ = run(zygote, tmp_path, "import time; time.sleep(30)")
    os.kill(zygote.pid, signal.SIGKILL)
    ends_s = time.monotonic() + 5
    while is_running(process.pid):
        assert time.monotonic() < ends_s
        time.sleep(0.01)
    with pytest.raises(OdysseyError, match="zygote"):
        process.wait(5)


def test_a_module_that_cannot_be_imported():
    with pytest.raises(ConfigError, match="--preload no.such.module: ModuleNotFoundError"):
        Zygote.spawn(["no.such.module"], {**os.environ, "PYTHONPATH": str(CHECKOUT)})


def test_modules_beside_the_script_are_found(server, tmp_path):
    """As a checkout's megatron is, before an installed one."""
    script, log = tmp_path / "script.py", tmp_path / "log"
    (tmp_path / "beside.py").write_text("")
    script.write_text("import sys\nprint('beside' in sys.modules, len(sys.path) - len(set(sys.path)))\n")
    argv = ["--nproc-per-node", 1, script, "--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run"]
    job = server.run(argv, log=log, env={"ODYSSEY_PRELOAD": "beside"})
    assert job.wait(30) == 0, job.log()
    assert "True 0" in job.log()


@pytest.mark.parametrize(
    ("line", "why"), [("sys.exit('it ends')", "SystemExit: it ends"), ("1 / 0", "ZeroDivision")]
)
def test_a_module_that_ends_the_process(tmp_path, line, why):
    (tmp_path / "ends.py").write_text(f"import sys\n{line}\n")
    with pytest.raises(ConfigError, match=why):
        Zygote.spawn(["ends"], {**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}"})


def test_the_launcher_s_arguments_are_not_for_the_modules(tmp_path):
    """A patched Megatron-LM would find ``--odyssey`` there, and that this process is no rank."""
    (tmp_path / "looks.py").write_text("import sys\nassert len(sys.argv) == 1, sys.argv\n")
    Zygote.spawn(["looks"], {**os.environ, "PYTHONPATH": f"{tmp_path}:{CHECKOUT}"}).close()


def test_a_module_that_starts_threads(tmp_path):
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()\n"
    )
    with pytest.raises(ConfigError, match="2 threads are running"):
        Zygote.spawn(["threads"], {**os.environ, "PYTHONPATH": f"{CHECKOUT}:{tmp_path}"})


def test_a_process_with_the_pid_of_an_earlier_one(zygote, tmp_path):
    """Pids wrap around in a long job: the exit of one process must not be taken for that of another."""
    first, _ = run(zygote, tmp_path, "pass")
    assert first.wait(10) == 0
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(50):  # others may be faster
        try:
            last_pid.write_text(str(first.pid - 1))
        except OSError:
            pytest.skip("only root may choose pids")
        second, _ = run(zygote, tmp_path, "import time; time.sleep(0.5); raise SystemExit(3)")
        if second.pid == first.pid:
            break
        second.kill()
        second.wait(10)
    else:
        pytest.skip("the pid is not given again")
    assert second.poll() is None
    assert second.wait(10) == 3
    assert first.poll() == 0


def test_what_torch_would_do_of_a_lost_peer_by_itself_is_off_unless_asked_for():
    env = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    prepare_environment(env)
    assert env["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == env["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    assert env["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"


class GivenUp(BaseException):
    """What pytest-timeout raises wherever a test is."""


def test_a_test_that_is_given_up_leaves_no_job_behind(zygote, tmp_path):
    def give_up(*_):
        raise GivenUp

    process, out = run(zygote, tmp_path, "import time; time.sleep(60)")
    before = signal.signal(signal.SIGUSR1, give_up)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(GivenUp):
            Job(process, out).wait(50)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    assert process.wait(20) == -signal.SIGKILL
