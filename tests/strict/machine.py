"""The machines of a job in one process: hosts that take turns, and devices that do what hosts have given them.

Nothing here runs by itself: a seed draws who makes the next move, so that a run can be repeated, and a job in which
nobody can move is found to be stuck at once. A host is a thread that runs until it waits for something, or is stopped
in between; a device has streams, whose operations run in the order in which they were given, whenever it is its turn.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_local = threading.local()


class Killed(BaseException):
    """This host's process is gone."""


class Deadlock(Exception):
    """Nobody can move."""


def _taken() -> threading.Lock:
    """For one to wait until another releases it: threading.Semaphore does the same, five times as slowly."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Host:
    """A thread that runs while it has its turn. ``may_be_left``: nobody minds if it never ends.

    Args:
        process: the hosts that are killed together with it.
    """

    def __init__(
        self,
        machine: Machine,
        name: str,
        main: Callable[[], None],
        process: list[Host],
        *,
        may_be_left: bool = False,
    ):
        self.name, self.over, self.killed, self.may_be_left = name, False, False, may_be_left
        self.process = process
        self.process.append(self)
        self.error: BaseException | None = None
        self._machine, self._main = machine, main
        self._until: Callable[[], bool] | None = None
        self._turn = _taken()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        return f"{self.name}: {'waits' if self._until else 'runs'}"

    @property
    def may_run(self) -> bool:
        return not self.over and (self.killed or self._until is None or self._until())

    def run(self) -> None:
        """Until it waits, is stopped in between, or ends. Called by the machine."""
        self._until = None
        self._turn.release()
        self._machine.back.acquire()

    def wait(self, until: Callable[[], bool] | None = None) -> None:
        """Called in its own thread: the others go on; this one once ``until()`` is true."""
        self._until = until
        self._machine.back.release()
        self._turn.acquire()
        if self.killed:
            raise Killed

    def kill_process(self) -> None:
        """All its threads, whatever they are in."""
        for one in self.process:
            one.killed = True

    def _run(self) -> None:
        self._turn.acquire()
        _local.host = self
        try:
            if not self.killed:
                self._main()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        self.over = True
        self._machine.back.release()


def this_host() -> Host:
    """The one whose turn it is."""
    host: Host = _local.host
    return host


class Event:
    """A place in a stream, as CUDA's."""

    def __init__(self, stream: Stream, knows: dict[Stream, int]):
        self.done, self.stream, self.knows = False, stream, knows

    def query(self) -> bool:
        return self.done


class Operation:
    """What a stream has been given. ``done()`` does it if it can be done by now."""

    __slots__ = ("done", "event", "name", "started", "waits_for")

    def __init__(self, name: str, done: Callable[[], bool], waits_for: Event | None, event: Event):
        self.name, self.done, self.waits_for, self.event = name, done, waits_for, event
        self.started = False


class Stream:
    """Operations in the order in which they were given. It waits; who gave them does not.

    Args:
        stays: each keeps a place on the device from when it begins until it is done, as kernels that wait for others.
    """

    def __init__(self, device: Device, name: str, *, stays: bool = False):
        self.device, self.name, self.stays = device, name, stays
        self.queue: deque[Operation] = deque()
        self.knows: dict[Stream, int] = {self: 0}
        """Of each stream of the device how many of its operations are over before the next one of this begins."""
        self.last = Event(self, {})
        self.last.done = True

    def give(self, name: str, done: Callable[[], bool], after: Event | None = None) -> Event:
        """The event behind the operation, which begins after ``after``."""
        if after is not None:
            self.learn(after.knows)
        self.learn(self.device.host_knows)
        self.knows[self] += 1
        self.last = Event(self, dict(self.knows))
        operation = Operation(name, done, after, self.last)
        self.queue.append(operation)
        self.device.given.append((self, operation))
        return self.last

    def learn(self, knows: dict[Stream, int]) -> None:
        for stream, count in knows.items():
            if count > self.knows.get(stream, 0):
                self.knows[stream] = count

    def wait(self, event: Event) -> None:
        """What is given from now on begins after ``event``."""
        if not event.done:
            self.give("wait", lambda: True, after=event)
        self.learn(event.knows)


class Device:
    """The accelerator of one rank.

    Args:
        one_queue: all streams share one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1): what was given later does not
            begin before all that was given earlier has begun, whichever its stream.
        resident: how many operations that stay there it has places for; None: for all. One that finds no place has not
            begun, and whatever is behind it waits, too.
    """

    def __init__(self, machine: Machine, rank: int, *, one_queue: bool = False, resident: int | None = None):
        self.machine, self.rank, self.one_queue, self.dead = machine, rank, one_queue, False
        self._places = math.inf if resident is None else resident
        """That are free."""
        self.streams: list[Stream] = []
        self._rings: dict[bool, list[Stream]] = {False: [], True: []}
        self._drawn = {False: 0, True: 0}
        self.given: deque[tuple[Stream, Operation]] = deque()
        self.host_knows: dict[Stream, int] = {}
        self._began = 0
        self.main = self.stream("main")
        self.syncs: list[str] = []
        """Of each time that the host waited for the device what for."""

    def stream(self, name: str, *, stays: bool = False) -> Stream:
        self.streams.append(Stream(self, name, stays=stays))
        return self.streams[-1]

    def draw_stream(self, *, first: bool) -> Stream:
        """One for a communicator, of those that come ``first`` or of the others. Of either there are few, in a ring, so
        that later ones share those of earlier ones.
        """
        ring, size = self._rings[first], self.machine.ring
        if len(ring) < size:
            ring.append(self.stream(f"{'first' if first else 'other'}.{len(ring)}", stays=True))
        self._drawn[first] += 1
        return ring[(self._drawn[first] - 1) % size]

    def close(self, stream: Stream) -> None:
        """No more operations will come."""
        self.streams.remove(stream)

    def synchronize(self, why: str, event: Event | None = None) -> None:
        """The host waits for ``event``, else for all that the main stream has been given."""
        event = event or self.main.last
        self.syncs.append(why)
        this_host().wait(lambda: event.done)
        for stream, count in event.knows.items():
            self.host_knows[stream] = max(count, self.host_knows.get(stream, 0))

    def advance(self, draw: random.Random) -> bool:
        """One operation of one stream, if there is one that can be done."""
        busy = [stream for stream in self.streams if stream.queue]
        draw.shuffle(busy)
        began = -1
        while not self.dead and began < self._began:  # what begins may let others begin
            began = self._began
            if any(self._advance(stream) for stream in busy):
                return True
        return False

    def _advance(self, stream: Stream) -> bool:
        operation = stream.queue[0]
        if not operation.started:
            if operation.waits_for is not None and not operation.waits_for.done:
                return False
            while self.given and self.given[0][1].started:
                self.given.popleft()
            if self.one_queue and self.given[0][1] is not operation:
                return False
            if self._places < stream.stays:
                return False
            self._places -= stream.stays
            operation.started = True
            self._began += 1
        if not operation.done():
            return False
        self._places += stream.stays
        stream.queue.popleft()
        operation.event.done = True
        self.machine.moves += 1
        return True


_RING = 32
"""Source: torch 2.13 ``c10/cuda/CUDAStream.h``."""


class Machine:
    """All hosts and devices. ``seed`` draws the order of their moves, and how fast each of them is."""

    def __init__(self, seed: int):
        self.draw = random.Random(seed)
        self.back = _taken()
        self.hosts: list[Host] = []
        self.devices: dict[int, Device] = {}
        self.moves = 0
        """Operations that devices have done."""
        self._weights: dict[Any, float] = {}
        self._stops = self.draw.choice((0.0, 0.02, 0.2))
        """How often a host is stopped in between, after it has given its device something to do."""
        self.ring = _RING
        """Streams of one priority on a device."""
        self.lazy = self.draw.random() < 0.5
        """Parts of communicators are connected when they are first used."""

    def host(self, name: str, main: Callable[[], None], *, may_be_left: bool = False) -> Host:
        """The first one of a process."""
        self.hosts.append(Host(self, name, main, [], may_be_left=may_be_left))
        return self.hosts[-1]

    def thread(self, name: str, main: Callable[[], None]) -> Host:
        """One more of the process whose turn it is."""
        self.hosts.append(Host(self, name, main, this_host().process, may_be_left=True))
        return self.hosts[-1]

    def device(self, rank: int, *, one_queue: bool = False, resident: int | None = None) -> Device:
        self.devices[rank] = Device(self, rank, one_queue=one_queue, resident=resident)
        return self.devices[rank]

    def may_stop(self) -> None:
        """Perhaps somebody else makes a move before the host goes on."""
        if self.draw.random() < self._stops:
            this_host().wait()

    def run(self) -> None:
        """Until all hosts have ended. Raises what one of them raised, or Deadlock."""
        while any(not host.over and not host.may_be_left for host in self.hosts):
            movers = [*(host for host in self.hosts if host.may_run), *self.devices.values()]
            while movers:
                mover = self.draw.choices(movers, [self._weight(one) for one in movers])[0]
                if isinstance(mover, Host):
                    mover.run()
                    if mover.error is not None:
                        raise mover.error
                    break
                if self._advance(mover):
                    break
                movers.remove(mover)
            else:
                raise Deadlock(self.state())
            self.hosts = [host for host in self.hosts if not host.over]
        for left in self.hosts:
            left.killed = True
            left.run()

    def _advance(self, device: Device) -> bool:
        moved = False
        for _ in range(self.draw.choice((1, 4, 30))):
            if not device.advance(self.draw):
                break
            moved = True
        return moved

    def _weight(self, mover: Any) -> float:
        if mover not in self._weights:
            self._weights[mover] = self.draw.choice((0.01, 0.3, 1.0))
        return self._weights[mover]

    def state(self) -> str:
        """Who waits for what."""
        lines = [str(host) for host in self.hosts if not host.over]
        for rank, device in sorted(self.devices.items()):
            for stream in device.streams:
                if stream.queue and not device.dead:
                    first = stream.queue[0]
                    began = "began" if first.started else "has not begun"
                    lines.append(
                        f"rank {rank}, {stream.name}: {first.name} {began}, {len(stream.queue)} queued"
                    )
        return "nobody can move:\n" + "\n".join(lines)
