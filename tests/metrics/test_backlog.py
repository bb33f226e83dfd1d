"""What waits to be written: nothing is lost unseen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from odyssey_megatron.metrics.backlog import Backlog

ROOM = 10


@given(st.lists(st.one_of(st.integers(1, 12), st.none())))
def test_every_item_is_written_or_counted_as_lost(moves):
    """A number puts an item of so many bytes, None writes the first."""
    one, out, lost, put = Backlog[int](ROOM), [], 0, 0
    for size in moves:
        if size is not None:
            one.put(put, size)
            put += 1
        elif one:
            out.append(one.first)
            one.written()
            lost += one.take_lost() if not one else 0
        assert one.put_so_far == put
        assert len(out) + lost + one.missing == put
    while one:
        out.append(one.first)
        one.written()
    assert out == sorted(out)
    assert len(out) + lost + one.take_lost() == put
    assert one.is_settled


def test_the_newest_are_kept_and_the_one_that_may_be_half_written():
    one = Backlog[str](ROOM)
    for item in "abcde":
        one.put(item, 4)
    kept = []
    while one:
        kept.append(one.first)
        one.written()
    assert kept == ["a", "e"]
    assert one.take_lost() == 3
    assert one.take_lost() == 0
