"""Generations in the store: the coordinator sends them whole, a rank reads the head and its own part of the plan."""

from __future__ import annotations

from odyssey_megatron.codec import from_json
from odyssey_megatron.errors import Superseded
from odyssey_megatron.launch import control as keys
from odyssey_megatron.launch.control import Control
from odyssey_megatron.plan import wire
from odyssey_megatron.plan.generation import Generation
from odyssey_megatron.plan.layout import Layout


def send_generation(generation: Generation, cell_size: int, control: Control) -> None:
    """With its whole plan. The parts first: whoever reads the head finds his own."""
    number, sent = generation.number, wire.to_wire(generation, cell_size)
    texts = {keys.part_key(number, worker): text for worker, text in sent.parts.items()}
    texts |= {keys.template_key(number, at): text for at, text in enumerate(sent.templates)}
    if texts:
        control.put_all(texts | {keys.routes_key(number): sent.routes})
    control.put(keys.generation_key(number), keys.OFFER * generation.planned + sent.head)


def read_generation(head_text: str, rank: int, control: Control) -> Generation | None:
    """The generation with what concerns the worker of ``rank``; None if it is gone, since all members of a later one
    have entered that, so that ``rank`` is none of them.
    """
    head, worker, part, template = from_json(wire.Head, head_text), 0, wire.NO_PART, ""
    if head.shape is not None:
        worker = rank // head.shape.cell_size
        if worker in wire.holding(head.shape):
            found = control.peek(keys.part_key(head.number, worker))
            part = from_json(wire.Part, found) if found else part
            template = control.peek(keys.template_key(head.number, part.template)) or ""
            if not found or not template:
                return None
    return wire.from_wire(head, worker, part, template)


def with_all_routes(control: Control, number: int, layout: Layout) -> Layout:
    """``layout`` of generation ``number`` with the ways that all microbatches go.

    Raises:
        Superseded: that generation is gone.
    """
    routes = control.peek(keys.routes_key(number))
    if routes is None:
        raise Superseded(f"generation {number} has ended")
    return wire.with_all_routes(layout, routes)
