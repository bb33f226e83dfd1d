"""The wire of the control plane: one store, keys under the job's prefix, values sealed with its token.

The store is torch's ``TCPStore``; it has no authentication of its own. Every value therefore carries a keyed
digest over (key, stamp, text): what was not written by a holder of the job's token is refused. The stamp says who wrote
it and when in his own count, so that what was recorded and is played back is known to be old. Nothing is unpickled.
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
from odyssey_megatron.launch.lost_host import connections_to, give_up_after

EVENTS = "events"
"""Queue of events, read by the coordinator only. FIFO: see ``Control.send``."""
JOB = "job"
JOB_NAME = "name"
"""A number that the job's host has drawn: what is on every line of this job's journals."""
REFUSED = "refused"
"""The first rank's one-paragraph ConfigError."""
FORGOTTEN = "forgotten"
"""The oldest generation that is not deleted."""
END = "end"
"""Set where somebody was asked to end the job, whose own ranks may not listen: all agents ask theirs."""
VERDICT = "verdict"
"""Exit code of the job, and why: the coordinator's last word to the agents."""

_DIGEST_CHARS = 32
_NOTHING = "?"
"""What is never sealed."""
_IDLE_TIMEOUT = timedelta(days=365)
_BATCH_BYTES = 2**15
"""About so much is set in one message. The store's server reads a message from its start again whenever more of it has
come, so that one of 24 MB takes 24 s, and the same in parts of up to 100 KB 0.2 s (measured with torch 2.13, libuv).
"""


def generation_key(number: int) -> str:
    return f"generation/{number}"


def part_key(number: int, worker: int) -> str:
    """What concerns one worker in that generation (``plan/wire.py``)."""
    return f"{generation_key(number)}/part/{worker}"


def template_key(number: int, template: int) -> str:
    """Programs of equal pipelines."""
    return f"{generation_key(number)}/template/{template}"


def routes_key(number: int) -> str:
    return f"{generation_key(number)}/routes"


def fallen_key(number: int, *, count: bool = False) -> str:
    """Where those who go on in generation ``number`` say that no words stand any more (``falling.py``); ``count``: how
    many of them have said so.
    """
    return f"{generation_key(number)}/fallen" + "/count" * count


def entered_key(number: int) -> str:
    """Where those who have trained so far say that they are in offered generation ``number``."""
    return f"{generation_key(number)}/entered"


def digest_key(rank: int) -> str:
    return f"{JOB}/digest/{rank}"


def met_key(rank: int) -> str:
    """Where a rank of Megatron-LM's says, before there is a plan, how the others reach it (``rebuild/groups.py``)."""
    return f"groups/0/world/{rank}"


def observations_key(rank: int) -> str:
    return f"observations/{rank}"


def welcome_key(rank: int, incarnation: int) -> str:
    """Where the coordinator answers a rank that joins: with the number of the newest generation."""
    return f"welcome/{rank}/{incarnation}"


def here_key(rank: int) -> str:
    """Where a process in the place of a dead rank says which incarnation it is, and behind a slash how many places of a
    whole cell it fills, if it is more than one; "" once it has died (its agent).
    """
    return f"here/{rank}"


def company_key(rank: int) -> str:
    """Where a process in the place of a dead rank says what it has read of its cell's ranks (:func:`here_key`) when all
    were there: of itself, and behind a colon of all. "" before.
    """
    return f"company/{rank}"


def places_key(worker: int) -> str:
    """Where the agent of a worker's node says how many places of a whole cell each process fills that joins for it."""
    return f"places/{worker}"


def comes_back_key(worker: int) -> str:
    """Where the coordinator says, before a cell leaves between two steps, as what it is to come back."""
    return f"comes-back/{worker}"


def left_key(rank: int) -> str:
    """Where a rank that has finished says that its script has ended, too."""
    return f"left/{rank}"


NOT_WELCOME = "alive"
"""That answer to a rank that is alive: two processes would be it."""


def node_key(node: int) -> str:
    """Where the agent of a node lists its ranks."""
    return f"node/{node}"


def replaced_key(node: int) -> str:
    """Counts the agents that have taken the place of the first one of ``node``."""
    return f"{node_key(node)}/replaced"


def lease_key(node: int) -> str:
    return f"lease/{node}"


def bye_key(node: int) -> str:
    """Put by the agent of ``node`` when it has heard of the end, and its ranks have ended."""
    return f"bye/{node}"


OFFER = "offer "
"""Marks a generation that begins between two steps; one without this mark ends its predecessor at once."""

AGAIN = "again "
"""Marks one that somebody has asked for, though nobody has died: he waited for others in the one before."""

_OF_GENERATION = re.compile(r"(?:generation|groups)/(\d+)(?:/.*)?")
"""Generations, and the addresses that their members exchange (``rebuild/groups.py``)."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Stamp:
    """When a value was sealed, as its writer counts."""

    incarnation: int = 0
    """Of the writer: which of the processes that were it one after another."""
    number: int
    """It never gives two values the same."""


_numbers = itertools.count(1)


class Control:
    """One connection to the store. Calls of several threads queue up behind each other.

    Raises, from every method: ControlPlaneLost if the connection is gone.
    """

    def __init__(self, store: dist.Store, token: str, *, writer: str = "", incarnation: int = 0):
        """``writer``: whose values they are that are put and sent here; of each there is one process at a time."""
        self._writer, self._incarnation = writer, incarnation
        self._sending = threading.Lock()
        self._heard: dict[str, Stamp] = {}
        self._latest: dict[str, tuple[Stamp, str]] = {}
        self._base, self._fingerprint = store, hashlib.sha256(b"odyssey check " + token.encode()).hexdigest()
        self._key = hashlib.sha256(b"odyssey seal " + token.encode()).digest()
        prefix = hashlib.sha256(b"odyssey prefix " + token.encode()).hexdigest()[:16]
        self.store = dist.PrefixStore(f"odyssey/{prefix}", store)
        """The raw store under the job's prefix: for counters and addresses, which are checked elsewhere."""

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
        """A client of the store at ``host:port``; later waits are unlimited unless they name a limit.

        Args:
            lease_s: a wait ends, too, when the store's host has not answered for so long.
        """
        try:
            store = dist.TCPStore(
                host, port, None, False, timedelta(seconds=timeout_s), wait_for_workers=False
            )
        except dist.DistError as error:
            raise ControlPlaneLost(f"no store at {host}:{port} within {timeout_s} s: {error}") from error
        store.set_timeout(_IDLE_TIMEOUT)
        for connection in connections_to(port):
            give_up_after(connection, lease_s)
        return cls(store, token, writer=writer, incarnation=incarnation)

    def same_token(self) -> bool:
        """Whether the first one who asked has this token; who has another one sees none of its keys."""
        with _lost():
            known = self._base.compare_set("odyssey/token", "", self._fingerprint)
            if known != self._fingerprint.encode():
                self._base.set("odyssey/other-token", "seen")
                return False
        return True

    def other_token_seen(self) -> bool:
        """Whether somebody came with another token."""
        with _lost():
            return self._base.check(["odyssey/other-token"])

    def seal(self, key: str, text: str) -> str:
        """``text`` with a stamp, and the keyed digest of all in front, of ``key`` too: no value works elsewhere."""
        stamped = f"{self._writer} {self._incarnation} {next(_numbers)}\n{text}"
        return self._digest(key, stamped) + stamped

    def _digest(self, key: str, stamped: str) -> str:
        body = f"{key}\0{stamped}".encode()
        return hmac.new(self._key, body, hashlib.sha256).hexdigest()[:_DIGEST_CHARS]

    def _open(self, key: str, value: bytes) -> tuple[str, Stamp, str]:
        """(writer, stamp, text). Raises ValueError for what no holder of the token has sealed."""
        sealed = value.decode()
        digest, stamped = sealed[:_DIGEST_CHARS], sealed[_DIGEST_CHARS:]
        if not hmac.compare_digest(self._digest(key, stamped).encode(), digest.encode()):
            raise ValueError(f"{key}: not sealed with this job's token")
        stamp, _, text = stamped.partition("\n")
        writer, incarnation, number = stamp.split(" ")
        return writer, Stamp(incarnation=int(incarnation), number=int(number)), text

    def unseal(self, key: str, value: bytes) -> str:
        """Inverse of :meth:`seal`. Raises ValueError for what no holder of the token has sealed."""
        return self._open(key, value)[2]

    def put(self, key: str, text: str) -> None:
        with _lost():
            self.store.set(key, self.seal(key, text))

    def put_all(self, texts: Mapping[str, str]) -> None:
        """Several, in few messages. A reader may find some of them before the others."""
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
        """Sets ``key`` unless somebody has; True if this call did."""
        sealed = self.seal(key, text)
        with _lost():
            return self.store.compare_set(key, "", sealed) == sealed.encode()

    def get(self, key: str, *, timeout_s: float | None = None) -> str:
        """The value, once there is one. Raises TimeoutError; ValueError if it is not ours; KeyError if it has come, and
        was deleted before it was read.
        """
        self.wait([key], timeout_s)
        if (text := self.peek(key)) is None:
            raise KeyError(key)
        return text

    def peek(self, key: str) -> str | None:
        """The value, or None if there is none yet."""
        with _lost():
            # Where there is none it gives back what is expected. A look before a get() would wait for ever where the
            # key is deleted in between.
            value = self.store.compare_set(key, _NOTHING, _NOTHING)
        return None if value == _NOTHING.encode() else self.unseal(key, value)

    def said(self, key: str) -> bool:
        """Whether a holder of the token has set it."""
        with contextlib.suppress(ValueError):
            return self.peek(key) is not None
        return False

    def read(self, keys: Sequence[str]) -> list[str]:
        """The values of keys that are all set, in one round trip."""
        with _lost():
            values = self.store.multi_get(list(keys))
        return [self.unseal(key, value) for key, value in zip(keys, values, strict=True)]

    def latest(self, keys: Sequence[str]) -> list[tuple[Stamp, str]]:
        """Of keys that are all set and overwritten by one writer each: the newest value that was ever seen here.

        What somebody without the token put in its place, or plays back, changes nothing.
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
        """Whether all of ``keys`` are set."""
        with _lost():
            return self.store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Until all ``keys`` are set. Raises TimeoutError."""
        limit = _IDLE_TIMEOUT if timeout_s is None else timedelta(seconds=timeout_s)
        with _lost():
            self.store.wait(list(keys), limit)

    def forget_before(self, number: int) -> None:
        """Deletes what generations before ``number`` left: the store must not grow with recoveries (I10). Who still
        waits for one of them, as it has stood still for so long, finds which is the oldest that there is.
        """
        self.put(FORGOTTEN, str(number))
        with _lost():
            for key in self.store.list_keys():
                found = _OF_GENERATION.fullmatch(key)
                if found and int(found[1]) < number:
                    self.store.delete_key(key)

    def count(self, key: str) -> int:
        """Adds one to a counter and returns it."""
        with _lost():
            return self.store.add(key, 1)

    def counted(self, key: str) -> int:
        """The value of a counter; 0 where nobody has counted."""
        with _lost():
            return self.store.add(key, 0)

    def forget(self, key: str) -> None:
        """Deletes ``key``, if it is there."""
        with _lost():
            self.store.delete_key(key)

    def send(self, event: Event, *, acknowledged: bool = False) -> None:
        """Queues an event for the coordinator, in one atomic operation (the sender may die any moment).

        Args:
            acknowledged: return only when the store has it, so that nothing that another process sends
                after this can be read before it.
        """
        text = to_json(event_to_jsonable(event))
        with _lost(), self._sending:  # they are heard in the order of their stamps, or not at all
            self.store.queue_push(EVENTS, self.seal(EVENTS, text))
            if acknowledged:
                # Answered in order on this connection; unlike queue_len() it lets other threads run meanwhile, without
                # which a rank would seem to hang while the store's host is frozen.
                self.store.check([EVENTS])

    def next_event(self) -> Event | str:
        """Blocks for the next event in the queue; a malformed one, or an old one, as a text about it."""
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
        """All events that are here, at least one unless ``timeout_s`` passes. Raises what has ended the thread."""
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
    """Turns torch's store errors into ours."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, dist.DistStoreError):
            raise TimeoutError(str(error).splitlines()[0]) from error
        if isinstance(error, dist.DistNetworkError):
            first_line = str(error).splitlines()[0]
            raise ControlPlaneLost(f"the coordinator's store is gone: {first_line}") from error
