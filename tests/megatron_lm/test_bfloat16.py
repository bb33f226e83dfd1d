"""In bf16 a gradient is rounded to other numbers if its loss was scaled by another factor. Megatron-LM scales losses by
the number of replicas, and so its own losses are 2e-5 apart with one and with three. Where nothing is scaled ours are
its.
"""

from __future__ import annotations

import pytest

from tests.megatron_lm.jobs import MOCK, assert_same_iterations, assert_same_lines

pytestmark = pytest.mark.matrix

PRINTED = 2e-7
"""Relative: of the seven digits that Megatron-LM prints, the last."""


@pytest.mark.timeout(400)
def test_without_a_scale_losses_are_plain_megatron_lms_to_the_digit(jobs, name):
    flags = f"{MOCK} --bf16 --calculate-per-token-loss"
    plain = jobs.plain(flags, ranks=2, stages=2)
    run = jobs.odyssey(name, flags, ranks=6, stages=2)
    assert_same_iterations(run.iterations, plain.iterations, rel=PRINTED)


@pytest.mark.timeout(400)
def test_losses_do_not_depend_on_the_number_of_replicas(jobs, name):
    one = jobs.odyssey(f"{name}-one", f"{MOCK} --bf16", ranks=2, stages=2)
    three = jobs.odyssey(f"{name}-three", f"{MOCK} --bf16", ranks=6, stages=2)
    assert_same_lines(one, three, rel=PRINTED)
