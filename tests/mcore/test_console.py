"""Each line of Megatron's log is printed once, whichever rank is the last one living."""

from __future__ import annotations

import pytest

from odyssey_megatron.mcore.loop.console import SurvivingLines


class Ranks:
    """Two that come by the same lines, the second one in the end alone; ``out`` is what was printed."""

    def __init__(self):
        self.out, notes = [], []
        self.first, self.second = (
            SurvivingLines(notes.append, lambda: (notes or [None])[-1]) for _ in range(2)
        )
        self.first.become_last()

    def say(self, *texts):
        for text in texts:
            for one in (self.first, self.second):
                one.say(lambda text=text: self.out.append(text))

    def begin(self, committed):
        for one in (self.first, self.second):
            one.begin(committed)


@pytest.mark.parametrize("behind", [0, 1, 2])
def test_the_successor_prints_what_the_last_one_did_not_come_to(behind):
    ranks = Ranks()
    ranks.begin(1)
    ranks.say("iteration 1", "validation 1")
    ranks.begin(2)
    lines = ["iteration 2", "validation 2"]
    ranks.say(*lines[: 2 - behind])
    for text in lines[2 - behind :]:  # the first one has died on its way there
        ranks.second.say(lambda text=text: ranks.out.append(text))
    ranks.second.become_last()
    ranks.second.begin(3)
    ranks.second.say(lambda: ranks.out.append("iteration 3"))
    assert ranks.out == ["iteration 1", "validation 1", *lines, "iteration 3"]


def test_the_successor_leaves_out_what_is_printed_already():
    ranks = Ranks()
    ranks.begin(1)
    ranks.first.say(lambda: ranks.out.append("iteration 1"))
    ranks.second.become_last()
    ranks.second.say(lambda: ranks.out.append("iteration 1"))
    assert ranks.out == ["iteration 1"]


def test_who_joins_late_stands_at_the_same_line():
    ranks = Ranks()
    for committed in range(1, 5):
        ranks.begin(committed)
        ranks.say(f"iteration {committed}")
    late = SurvivingLines(lambda place: None, lambda: "[4, 0]")
    late.say(lambda: ranks.out.append("of its set-up"))
    late.become_last()
    late.begin(5)
    late.say(lambda: ranks.out.append("iteration 5"))
    assert ranks.out == [f"iteration {one}" for one in range(1, 6)]
