"""Start-up by forking: one process imports the heavy modules, and ranks (or whole jobs) are forked from it.

Importing torch and megatron costs seconds of CPU; a fork costs milliseconds, and the memory is shared. This is only
for CPU jobs: a CUDA context does not survive a fork. The zygote has a single thread, as forking requires, and knows
nothing of jobs: it takes requests, one JSON object per line, and reports pids and exit codes in the same way.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from odyssey_megatron.errors import ConfigError, OdysseyError
from odyssey_megatron.launch.process.ending import exit_with
from odyssey_megatron.launch.process.signals import HANDLED

_PR_SET_PDEATHSIG = 1


class Zygote:
    """The client's end of a connection to a zygote. Not thread-safe."""

    def __init__(self, pid: int, connection: socket.socket):
        self.pid, self._connection = pid, connection
        self._pending = b""
        self._exits: dict[int, int] = {}

    @classmethod
    def start(cls, modules: Sequence[str], folder: str) -> Zygote:
        """Fork the zygote off this process, which must have one thread; return when it has imported all ``modules``,
        with ``folder`` searched first.

        Raises:
            ConfigError: A module cannot be imported, or leaves threads behind.
        """
        prepare_environment(os.environ)
        _check_single_thread()
        ours, theirs = socket.socketpair()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            ours.close()
            exit_with(lambda: _Server(theirs, modules, parent, folder).serve())
        theirs.close()
        return cls(pid, ours)._greet(modules)

    @classmethod
    def spawn(cls, modules: Sequence[str], env: Mapping[str, str]) -> Zygote:
        """Start the zygote in a fresh interpreter with environment ``env``, for a process that has threads already."""
        ours, theirs = socket.socketpair()
        env = dict(env)
        prepare_environment(env)
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), ",".join(modules)]
        process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])
        theirs.close()
        return cls(process.pid, ours)._greet(modules)

    def _greet(self, modules: Sequence[str]) -> Zygote:
        answer = self._read(None)
        if answer is None or "error" in answer:
            raise ConfigError(f"--preload {','.join(modules)}: {(answer or {}).get('error')}")
        return self

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: str | None = None,
        stderr: str | None = None,
    ) -> ForkedProcess:
        """Run ``argv``, the arguments of a Python interpreter, in a fork with a session of its own.

        Args:
            env: The whole environment.
            stdout, stderr: Paths of files to append to; None: the zygote's own.

        Raises:
            OSError: There is no room for one more process.
        """
        self._send(argv=list(argv), env=dict(env), stdout=stdout, stderr=stderr)
        while not {"pid", "failed"} & (answer := self._read(None) or {}).keys():
            self._note(answer)
        if "failed" in answer:
            raise OSError(answer["failed"], os.strerror(answer["failed"]))
        return ForkedProcess(answer["pid"], self)

    def close(self) -> None:
        """End the zygote and all processes that it has forked."""
        self._connection.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def exit_code(self, pid: int, timeout_s: float | None) -> int | None:
        """Return the exit code of ``pid``, or None if it has not ended within ``timeout_s``.

        A code is told only once: the pid may soon be another process's.
        """
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while pid not in self._exits:
            answer = self._read(None if ends_s is None else max(ends_s - time.monotonic(), 0.0))
            if answer is None:
                return None
            self._note(answer)
        return self._exits.pop(pid)

    def _note(self, answer: dict[str, Any]) -> None:
        self._exits[answer["exited"]] = answer["code"]

    def reap(self, pid: int) -> None:
        """Let go of an ended process; until then its pid is not given to another one."""
        self._send(reap=pid)

    def _send(self, **message: Any) -> None:
        self._connection.sendall((json.dumps(message) + "\n").encode())

    def _read(self, timeout_s: float | None) -> dict[str, Any] | None:
        while b"\n" not in self._pending:
            if not select.select([self._connection], [], [], timeout_s)[0]:
                return None
            data = self._connection.recv(1 << 16)
            if not data:
                raise OdysseyError("the zygote, from which processes are forked, has died")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


class ForkedProcess:
    """A process forked by a zygote, with as much of the interface of ``subprocess.Popen`` as is needed."""

    def __init__(self, pid: int, zygote: Zygote):
        self.pid, self._zygote = pid, zygote
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal), or None while the process runs."""
        return self._end(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def _end(self, timeout_s: float | None) -> int | None:
        if self._code is None:
            self._code = self._zygote.exit_code(self.pid, timeout_s)
            if self._code is not None:
                self._zygote.reap(self.pid)
        return self._code

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process's whole session, unless it is gone."""
        if self._code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has not begun its session yet
                os.kill(self.pid, number)


class _Server:
    """The zygote's own side: it forks processes on request."""

    def __init__(self, connection: socket.socket, modules: Sequence[str], parent: int, folder: str = ""):
        """``folder``: where modules are looked for first; empty: only where this interpreter looks."""
        self._connection, self._modules, self._parent = connection, modules, parent
        self._folder = folder
        self._pending = b""
        self._children: dict[int, int] = {}  # pidfd -> pid

    def serve(self) -> int:
        _die_with(self._parent)
        # Signals are for the launcher, with which this ends. They are blocked, not ignored: a fork must still get those
        # that were sent before it could handle them.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        # Ranks get theirs. By --odyssey a patched Megatron-LM would take this process for one that lacks its variables.
        sys.argv = sys.argv[:1]
        if self._folder:
            sys.path.insert(0, self._folder)
        try:
            for module in self._modules:
                importlib.import_module(module)
            if self._folder in sys.path:  # a fork has the folder of its own script there
                sys.path.remove(self._folder)
            _check_single_thread()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign module raises the launcher reports
            self._send(error=f"{type(error).__name__}: {error}")
            return 1
        gc.collect()
        gc.freeze()  # otherwise a collection in a child would copy the pages that it marks
        self._send(ready=True)
        while self._step():
            pass
        return 0

    def _step(self) -> bool:
        ready, _, _ = select.select([self._connection.fileno(), *self._children], [], [])
        for fd in ready:
            if fd == self._connection.fileno():
                data = b""
                with contextlib.suppress(
                    ConnectionResetError
                ):  # the launcher was killed, and had not read all
                    data = self._connection.recv(1 << 16)
                if not data:
                    return False
                *lines, self._pending = (self._pending + data).split(b"\n")
                for line in lines:
                    self._answer(json.loads(line))
            else:
                pid = self._children.pop(fd)
                os.close(fd)
                # Not reaped yet: the client may be about to open a pidfd, or to signal its session.
                ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                assert ended is not None, "only with WNOHANG"
                exited = ended.si_code == os.CLD_EXITED
                self._send(exited=pid, code=ended.si_status if exited else -ended.si_status)
        return True

    def _answer(self, request: dict[str, Any]) -> None:
        if "reap" in request:
            os.waitpid(request["reap"], 0)
        else:
            self._fork(request)

    def _fork(self, request: dict[str, Any]) -> None:
        """Fork, or tell why that cannot be: the zygote's end would be that of all its children."""
        parent = os.getpid()
        try:
            # A fork without room for its pidfd would begin, and complain, before it is killed.
            room = os.dup(self._connection.fileno())
            try:
                pid = os.fork()
            finally:
                os.close(room)
        except OSError as error:
            return self._send(failed=error.errno)
        if pid == 0:
            self._connection.close()
            for fd in self._children:
                os.close(fd)
            exit_with(lambda: _run_python(request, parent))
        try:
            self._children[os.pidfd_open(pid)] = pid
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return self._send(failed=error.errno)
        return self._send(pid=pid)

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the next read sees the end
            self._connection.sendall((json.dumps(message) + "\n").encode())


def _run_python(request: dict[str, Any], parent: int) -> int:
    """Turn this fork, as far as possible, into a fresh interpreter with the requested arguments."""
    os.setsid()
    _die_with(parent)
    for fd, path in ((1, request["stdout"]), (2, request["stderr"])):
        if path:
            target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(target, fd)
            os.close(target)
    # Line by line: see ``printing.py``.
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), line_buffering=True)
    sys.stderr = io.TextIOWrapper(os.fdopen(2, "wb", 0, closefd=False), line_buffering=True)
    for number in HANDLED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ["ODYSSEY_PARENT_PID"] = str(parent)
    _reseed()
    arguments = request["argv"]
    if arguments[0] == "-u":  # its outputs are unbuffered anyway; another one is the script's own
        arguments = arguments[1:]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0:1] = [os.getcwd()]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0:1] = [os.path.dirname(os.path.abspath(arguments[0]))]
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _reseed() -> None:
    """Reseed numpy and torch, as forks share their parent's random state. Python reseeds its own generator."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def prepare_environment(env: MutableMapping[str, str]) -> None:
    """Set in ``env`` what must be set before torch and numpy are imported, unless the user has set it."""
    # Numerical libraries start threads when imported, unless told not to. 1 is torchrun's default, too.
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("OPENBLAS_NUM_THREADS", env["OMP_NUM_THREADS"])
    # torch elastic would choose 1, with which each rank's watchdog ends it when a peer is gone.
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # Whatever the above, a watchdog that notices the end of a peer has debug information dumped. It sleeps four times
    # this long with a lock held that the next operation waits for, and minutes later its monitor ends the process.
    # Source:
    # torch 2.8 ProcessGroupNCCL.cpp, Watchdog::runLoop and HeartbeatMonitor::runLoop.
    env.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    env.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0")
    # The monitor would also take an abort that lasts longer than an operation may for a hung watchdog.
    env.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    # Communicators with NVLink SHARP are known to hang when aborted. NVIDIA's nvidia-resiliency-ext asks for the same.
    env.setdefault("NCCL_NVLS_ENABLE", "0")
    # torch warns that messages through one communicator are serialized; here they have it to themselves.
    env.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    # torch's store client complains, with a C++ stack, of every connection that ends.
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Each of its connects makes a reverse lookup of the server's address, and a resolver that drops bursts
    # would cost seconds a rank.
    env.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def _check_single_thread() -> None:
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise ConfigError(
            f"{threads} threads are running, and only one survives a fork. Set OMP_NUM_THREADS=1, and preload "
            "only modules that start no threads when imported."
        )


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    _connection = socket.socket(fileno=int(sys.argv[1]))
    sys.exit(_Server(_connection, [one for one in sys.argv[2].split(",") if one], os.getppid()).serve())
