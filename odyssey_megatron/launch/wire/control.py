"""The wire of the control plane: one store, keys under the job's prefix, values sealed with the job's token.

The store is torch's ``TCPStore``, which has no authentication of its own. Every value therefore carries a keyed
digest over (key, stamp, text): values not written by a holder of the job's token are refused. The stamp names the
writer and counts his values, so that a value that was recorded and is played back is known to be old. Nothing is
unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import queue
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from odyssey_megatron.cluster.events import Event, event_from_jsonable, event_to_jsonable
from odyssey_megatron.codec import to_json
from odyssey_megatron.errors import ControlPlaneLost
from odyssey_megatron.launch.wire.lost_host import give_up_on_host

_ATTEMPTS = 3
"""How often to connect within the limit. torch's client was seen to be stuck in one attempt, though the store listened
and others were connected to it.
"""
EVENTS = "events"
"""Queue of events, read by the coordinator only. FIFO: see ``Control.send``."""
JOB = "job"
CONTACT = "contact"
"""Set by each rank that joins the job, before it says for what; see :func:`is_stranger`."""
OTHER_JOB = "job/other"
"""What the first rank whose job differs from that of rank 0 was started for."""
JOB_NAME = "name"
"""A random number that the job's host has drawn. It is on every line of this job's journals."""
REFUSED = "refused"
"""The text of the first error for which no hardware is to blame: a ConfigError, or an error that ranks have alike."""
FORGOTTEN = "forgotten"
"""The number of the oldest generation that is not deleted."""
END = "end"
"""Set by an agent that was asked to end the job, as its own ranks may not listen. All agents then ask theirs."""
VERDICT = "verdict"
"""Exit code of the job, and why: the coordinator's last word to the agents."""

_DIGEST_CHARS = 32
_NOTHING = "?"
"""A value that is never sealed, and so never stored: it stands for a missing key."""
_IDLE_TIMEOUT = timedelta(days=365)
_BATCH_BYTES = 2**15
"""The approximate size of one message that sets several keys. The store's server reads a message again from its start
whenever more of it has come, so 24 MB take 24 s in one message, and 0.2 s in parts of up to 100 KB (measured with torch
2.13, libuv).
"""


def is_stranger(control: Control, mode: str) -> bool:
    """Whether the job's script may know nothing of Odyssey: ``--odyssey`` is ``mode``, and no rank has joined."""
    return mode == "off" and not control.has([CONTACT])


def generation_key(number: int) -> str:
    return f"generation/{number}"


def part_key(number: int, worker: int) -> str:
    """Return the key of the part of a generation that concerns one worker (``plan/sending/wire.py``)."""
    return f"{generation_key(number)}/part/{worker}"


def template_key(number: int, template: int) -> str:
    """Return the key of a template: programs that equal pipelines share."""
    return f"{generation_key(number)}/template/{template}"


def routes_key(number: int) -> str:
    return f"{generation_key(number)}/routes"


def fallen_key(number: int, *, count: bool = False) -> str:
    """Return the key that is set once the words of all who go on in generation ``number`` have fallen (``falling.py``).

    With ``count`` it is the key of the counter of those who have said so.
    """
    return f"{generation_key(number)}/fallen" + "/count" * count


def entered_key(number: int) -> str:
    """Return the key that is set once the ranks that have trained so far are in offered generation ``number``."""
    return f"{generation_key(number)}/entered"


def digest_key(rank: int) -> str:
    return f"{JOB}/digest/{rank}"


def met_key(rank: int) -> str:
    """Return the key at which a rank says, before there is a plan, how others reach it (``rebuild/groups.py``).

    Only ranks of Megatron-LM jobs need it.
    """
    return f"groups/0/world/{rank}"


def observations_key(rank: int) -> str:
    return f"observations/{rank}"


def welcome_key(rank: int, incarnation: int) -> str:
    """Return the key at which the coordinator answers a rank that joins, with the newest generation's number."""
    return f"welcome/{rank}/{incarnation}"


def joined_key(rank: int) -> str:
    """Return the key that is set once a process in the place of a dead rank has all its state. An agent that takes a
    node over deletes it.
    """
    return f"joined/{rank}"


def here_key(rank: int) -> str:
    """Return the key at which a process in the place of a dead rank says which incarnation it is.

    A slash and the number of ranks of its cell follow if that is a smaller one. Its agent sets "" once it has died.
    """
    return f"here/{rank}"


def company_key(rank: int) -> str:
    """Return the key at which a process in the place of a dead rank says which processes of its cell it has met.

    The value is its own text of :func:`here_key`, a colon, and the texts of all ranks of the cell. "" before.
    """
    return f"company/{rank}"


def places_key(worker: int) -> str:
    """Return the key at which an agent says how many ranks ``worker`` is to have; 0: all."""
    return f"places/{worker}"


def comes_back_key(worker: int) -> str:
    """Return the key at which the coordinator says, before a cell leaves between two steps, how it is to come back."""
    return f"comes-back/{worker}"


def left_key(rank: int) -> str:
    """Return the key at which a rank that has finished training says that its script has ended, too."""
    return f"left/{rank}"


NOT_WELCOME = "alive"
"""The answer at :func:`welcome_key` if the rank is alive already, as two processes cannot be one rank."""


def node_key(node: int) -> str:
    """Return the key at which the agent of a node lists its ranks."""
    return f"node/{node}"


def agents_key(node: int) -> str:
    """Return the key of the counter of agents that have come as ``node`` to start its ranks: the first one does."""
    return f"{node_key(node)}/agents"


def replaced_key(node: int) -> str:
    """Return the key of the counter of agents that have taken the place of the first one of ``node``."""
    return f"{node_key(node)}/replaced"


def lease_key(node: int) -> str:
    return f"lease/{node}"


def may_leave_key(node: int) -> str:
    """Return the key at which the coordinator says why the ranks of ``node`` cannot leave; "": they may."""
    return f"may-leave/{node}"


def bye_key(node: int) -> str:
    """Return the key that the agent of ``node`` sets when it has heard of the job's end and its ranks have ended."""
    return f"bye/{node}"


OFFER = "offer "
"""The mark of a generation that begins between two steps. One without this mark ends its predecessor at once."""

AGAIN = "again "
"""The mark of a generation that a rank has asked for although nobody has died, as it waited for others before."""

_OF_GENERATION = re.compile(r"(?:generation|groups)/(\d+)(?:/.*)?")
"""The keys of generations, and of the addresses that their members exchange (``rebuild/groups.py``)."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Stamp:
    """When a value was sealed, by its writer's count."""

    incarnation: int = 0
    """The incarnation of the writer."""
    number: int
    """A number that the writer's process increases with each value."""


_numbers = itertools.count(1)


class Control:
    """One connection to the store. Calls of several threads wait for one another.

    Every method raises ControlPlaneLost if the connection is gone.
    """

    def __init__(self, store: dist.Store, token: str, *, writer: str = "", incarnation: int = 0):
        """``writer``: names the author of values that are put and sent here. It must be one process at a time."""
        self._writer, self._incarnation = writer, incarnation
        self._sending = threading.Lock()
        self._heard: dict[str, Stamp] = {}
        self._latest: dict[str, tuple[Stamp, str]] = {}
        self._base, self._fingerprint = store, hashlib.sha256(b"odyssey check " + token.encode()).hexdigest()
        self._key = hashlib.sha256(b"odyssey seal " + token.encode()).digest()
        prefix = hashlib.sha256(b"odyssey prefix " + token.encode()).hexdigest()[:16]
        self.store = dist.PrefixStore(f"odyssey/{prefix}", store)
        """The raw store under the job's prefix, for counters and addresses, which are checked elsewhere."""

    @classmethod
    def connect(
        cls,
        host: str,
        port: int,
        token: str,
        *,
        timeout_s: float = 60.0,
        lease_s: float = 3.0,
        writer: str = "",
        incarnation: int = 0,
    ) -> Control:
        """Return a client of the store at ``host:port``. Later waits are unlimited unless they name a limit.

        Args:
            timeout_s: The limit for connecting.
            lease_s: A wait also ends if the store's host has not answered for this time and a little more.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                store = dist.TCPStore(
                    host, port, None, False, timedelta(seconds=timeout_s / _ATTEMPTS), wait_for_workers=False
                )
                break
            except dist.DistError as error:
                if not left:
                    what = f"no store at {host}:{port} within {timeout_s} s: {error}"
                    raise ControlPlaneLost(what) from error
        store.set_timeout(_IDLE_TIMEOUT)
        give_up_on_host(port, lease_s)
        return cls(store, token, writer=writer, incarnation=incarnation)

    def same_token(self) -> bool:
        """Return whether this token is that of the first process that asked. Others see none of that one's keys."""
        with _lost():
            known = self._base.compare_set("odyssey/token", "", self._fingerprint)
            if known != self._fingerprint.encode():
                self._base.set("odyssey/other-token", "seen")
                return False
        return True

    def other_token_seen(self) -> bool:
        """Return whether somebody came with another token."""
        with _lost():
            return self._base.check(["odyssey/other-token"])

    def seal(self, key: str, text: str) -> str:
        """Return ``text`` with a stamp, and in front of them a keyed digest.

        The digest covers ``key``, too, so that a value is not valid under another key.
        """
        stamped = f"{self._writer} {self._incarnation} {next(_numbers)}\n{text}"
        return self._digest(key, stamped) + stamped

    def _digest(self, key: str, stamped: str) -> str:
        body = f"{key}\0{stamped}".encode()
        return hmac.new(self._key, body, hashlib.sha256).hexdigest()[:_DIGEST_CHARS]

    def _open(self, key: str, value: bytes) -> tuple[str, Stamp, str]:
        """Return (writer, stamp, text). Raises ValueError for a value that no holder of the token has sealed."""
        sealed = value.decode()
        digest, stamped = sealed[:_DIGEST_CHARS], sealed[_DIGEST_CHARS:]
        if not hmac.compare_digest(self._digest(key, stamped).encode(), digest.encode()):
            raise ValueError(f"{key}: not sealed with this job's token")
        stamp, _, text = stamped.partition("\n")
        writer, incarnation, number = stamp.split(" ")
        return writer, Stamp(incarnation=int(incarnation), number=int(number)), text

    def unseal(self, key: str, value: bytes) -> str:
        """Invert :meth:`seal`. Raises ValueError for a value that no holder of the token has sealed."""
        return self._open(key, value)[2]

    def put(self, key: str, text: str) -> None:
        with _lost():
            self.store.set(key, self.seal(key, text))

    def put_all(self, texts: Mapping[str, str]) -> None:
        """Put several values in few messages. A reader may find some of them before the others."""
        batch, size = dict[str, str](), 0
        with _lost():
            for key, text in texts.items():
                batch[key] = self.seal(key, text)
                size += len(batch[key])
                if size >= _BATCH_BYTES:
                    self._set(batch)
                    batch, size = {}, 0
            if batch:
                self._set(batch)

    def _set(self, sealed: Mapping[str, str]) -> None:
        self.store.multi_set([*sealed], [*sealed.values()])  # type: ignore[attr-defined]

    def put_first(self, key: str, text: str) -> bool:
        """Set ``key`` unless somebody has, and return whether this call did."""
        sealed = self.seal(key, text)
        with _lost():
            return self.store.compare_set(key, "", sealed) == sealed.encode()

    def get(self, key: str, *, timeout_s: float | None = None) -> str:
        """Return the value of ``key``, once there is one.

        Raises:
            TimeoutError: There is none within ``timeout_s``.
            ValueError: No holder of the token has sealed it.
            KeyError: It has come, and was deleted before it was read.
        """
        self.wait([key], timeout_s)
        if (text := self.peek(key)) is None:
            raise KeyError(key)
        return text

    def peek(self, key: str) -> str | None:
        """Return the value of ``key``, or None if there is none yet."""
        with _lost():
            # If there is none, compare_set returns the expected value. A check followed by a get() would wait for ever
            # if the key is deleted in between.
            value = self.store.compare_set(key, _NOTHING, _NOTHING)
        return None if value == _NOTHING.encode() else self.unseal(key, value)

    def said(self, key: str) -> bool:
        """Return whether a holder of the token has set ``key``."""
        with contextlib.suppress(ValueError):
            # A peek at a missing key wakes whoever waits for it, as if it had come.
            return self.has([key]) and self.peek(key) is not None
        return False

    def read(self, keys: Sequence[str]) -> list[str]:
        """Return the values of ``keys``, which must all be set, in one round trip."""
        with _lost():
            values = self.store.multi_get(list(keys))
        return [self.unseal(key, value) for key, value in zip(keys, values, strict=True)]

    def latest(self, keys: Sequence[str]) -> list[tuple[Stamp, str]]:
        """Return (stamp, text) of the newest value of each key that was ever seen here.

        All ``keys`` must be set, and each is overwritten by one writer only. A value that somebody without the token
        has put there, or plays back, changes nothing.
        """
        with _lost():
            values = self.store.multi_get(list(keys))
        for key, value in zip(keys, values, strict=True):
            try:
                _, stamp, text = self._open(key, value)
            except ValueError:
                continue
            if key not in self._latest or self._latest[key][0] < stamp:
                self._latest[key] = stamp, text
        return [self._latest.get(key, (Stamp(number=0), "")) for key in keys]

    def has(self, keys: Sequence[str]) -> bool:
        """Return whether all of ``keys`` are set."""
        with _lost():
            return self.store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Wait until all ``keys`` are set. Raises TimeoutError."""
        limit = _IDLE_TIMEOUT if timeout_s is None else timedelta(seconds=timeout_s)
        with _lost():
            self.store.wait(list(keys), limit)

    def forget_before(self, number: int) -> None:
        """Delete what generations before ``number`` left, as the store must not grow with recoveries (I10).

        A process that has stood still for long may still wait for one of them. At ``FORGOTTEN`` it finds the number of
        the oldest generation that there is.
        """
        self.put(FORGOTTEN, str(number))
        for of, key in self.of_generations():
            if of < number:
                self.forget(key)

    def of_generations(self) -> list[tuple[int, str]]:
        """Return (number, key) of all that generations have left."""
        with _lost():
            found = [_OF_GENERATION.fullmatch(key) for key in self.store.list_keys()]
        return [(int(one[1]), one[0]) for one in found if one]

    def count(self, key: str) -> int:
        """Add one to a counter, and return its new value."""
        with _lost():
            return self.store.add(key, 1)

    def counted(self, key: str) -> int:
        """Return the value of a counter: 0 if nobody has counted."""
        with _lost():
            return self.store.add(key, 0)

    def forget(self, key: str) -> None:
        """Delete ``key``, if it is set."""
        with _lost():
            self.store.delete_key(key)

    def send(self, event: Event, *, acknowledged: bool = False) -> None:
        """Queue an event for the coordinator, in one atomic operation (the sender may die any moment).

        Args:
            acknowledged: Return only when the store has it, so that nothing that another process sends
                after this can be read before it.
        """
        text = to_json(event_to_jsonable(event))
        with _lost(), self._sending:  # an event with an older stamp than the last one is refused
            self.store.queue_push(EVENTS, self.seal(EVENTS, text))
            if acknowledged:
                # The answer comes in order on this connection. Unlike queue_len() this call lets other threads run
                # meanwhile; otherwise a rank would seem to hang while the store's host is frozen.
                self.store.check([EVENTS])

    def next_event(self) -> Event | str:
        """Wait for the next event in the queue, and return it; a text about it if it is malformed or old."""
        with _lost():
            value = self.store.queue_pop(EVENTS)
        try:
            writer, stamp, text = self._open(EVENTS, value)
            if writer in self._heard and stamp <= self._heard[writer]:
                raise ValueError(f"{writer} has said that before, or something later")
            self._heard[writer] = stamp
            return event_from_jsonable(json.loads(text))
        except ValueError as error:
            return f"{error}: {value[:80]!r}"


class EventReader:
    """Reads the queue of events in a thread, on a connection of its own.

    torch's store can wait with a limit too, but complains on stderr each time it is reached.
    """

    def __init__(self, control: Control):
        self._control = control
        self._events: queue.SimpleQueue[Event | str | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="odyssey-events", daemon=True).start()

    def take(self, timeout_s: float) -> list[Event | str]:
        """Return all events that are here. Waits for the first one for up to ``timeout_s``.

        Raises the exception that has ended the thread, if there is one.
        """
        found: list[Event | str] = []
        try:
            while True:
                event = self._events.get(timeout=0.0 if found else timeout_s)
                if isinstance(event, Exception):
                    raise event
                found.append(event)
        except queue.Empty:
            return found

    def _run(self) -> None:
        try:
            while True:
                self._events.put(self._control.next_event())
        except Exception as error:  # noqa: BLE001 - without events the coordinator would wait for ever
            self._events.put(error)


class _lost:
    """A context that turns torch's store errors into ControlPlaneLost or TimeoutError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, dist.DistStoreError):
            raise TimeoutError(str(error).splitlines()[0]) from error
        if isinstance(error, dist.DistNetworkError):
            first_line = str(error).splitlines()[0]
            raise ControlPlaneLost(f"the coordinator's store is gone: {first_line}") from error
