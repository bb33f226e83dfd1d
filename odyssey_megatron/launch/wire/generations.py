"""Generations in the store: the coordinator sends whole ones, and a rank reads the head and its part of the plan."""

from __future__ import annotations

from odyssey_megatron.codec import from_json, from_jsonable, parsed, to_json
from odyssey_megatron.errors import Superseded
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.launch.wire.control import Control
from odyssey_megatron.plan.layout import Layout
from odyssey_megatron.plan.sending import wire
from odyssey_megatron.plan.sending.generation import Finished, Generation, Message, Stop


def send(message: Message, cell_size: int, control: Control) -> None:
    """Write ``message``, a generation with its whole plan. The parts come first, so that a rank that reads the head
    finds its own part.
    """
    if not isinstance(message, Generation):
        return control.put(keys.generation_key(message.number), to_json(message))
    number, sent = message.number, wire.to_wire(message, cell_size)
    texts = {keys.part_key(number, worker): text for worker, text in sent.parts.items()}
    texts |= {keys.template_key(number, at): text for at, text in enumerate(sent.templates)}
    if texts:
        control.put_all(texts | {keys.routes_key(number): sent.routes})
    again = not message.planned and not message.dead and message.previous is not None
    control.put(keys.generation_key(number), keys.OFFER * message.planned + keys.AGAIN * again + sent.head)


def withdraw(number: int, after: int, control: Control) -> None:
    """Delete what the offers behind generation ``after`` left, up to ``number``, which has failed (I10).

    A mark stays at the head of each, as ranks hear of all numbers in turn. Addresses of ``number`` stay until the next
    offer fails: a rank may still connect its groups, and torch's store waits without limit for keys that are deleted.
    """
    control.put(keys.generation_key(number), keys.OFFER)
    for of, key in control.of_generations():
        head, addresses = keys.generation_key(of), not key.startswith(keys.generation_key(of))
        if after < of <= number and key != head and not (addresses and of == number):
            control.forget(key)


def read(text: str, rank: int, control: Control) -> Message | None:
    """Return the message with head ``text``, and with the part of its plan for the worker of ``rank``.

    None if it is withdrawn, or that part is deleted: all members of a later generation have entered it, and ``rank`` is
    none of them.
    """
    if not text:
        return None
    head: wire.Head | Stop | Finished = from_jsonable(wire.Head | Stop | Finished, parsed(text))
    if not isinstance(head, wire.Head):
        return head
    worker, part, template = rank // head.shape.cell_size, wire.NO_PART, ""
    if wire.has_part(head.shape, worker):
        found = control.peek(keys.part_key(head.number, worker))
        if not found:
            return None
        part = from_json(wire.WorkerPart, found)
        if part.template != wire.NO_PROGRAM:
            template = control.peek(keys.template_key(head.number, part.template)) or ""
            if not template:
                return None
    return wire.from_wire(head, worker, part, template)


def with_all_routes(control: Control, number: int, layout: Layout) -> Layout:
    """Return ``layout`` of generation ``number`` with the routes of all microbatches.

    Raises:
        Superseded: That generation is deleted.
    """
    routes = control.peek(keys.routes_key(number))
    if routes is None:
        raise Superseded(f"generation {number} has ended")
    return wire.with_all_routes(layout, routes)
