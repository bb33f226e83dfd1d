"""The table of seams held against the source of every Megatron-LM checkout that is given."""

from __future__ import annotations

from odyssey_megatron.mcore import seams
from odyssey_megatron.mcore.seam_table import SEAMS
from odyssey_megatron.mcore.source import Source


def test_each_seam_is_as_recorded(any_megatron_lm):
    source = Source((any_megatron_lm,))
    version = source.version()
    assert version is not None
    findings = [seams.check(seam, source, version) for seam in SEAMS]
    wrong = [
        (one.seam.target, one.expected, one.found) for one in findings if one.state not in ("ok", "unused")
    ]
    assert not wrong
    there = [one.seam.target for one in findings if one.state == "unused" and one.found is not None]
    assert not there, "recorded as gone"


def test_targets_are_listed_once():
    targets = [seam.target for seam in SEAMS]
    assert len(set(targets)) == len(targets) > 30
