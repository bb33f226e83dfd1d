"""A seam that is not as recorded stops the job before anything is trained: nothing is left out in silence."""

from __future__ import annotations

import pytest

from odyssey_megatron.upstream import compat, seams
from tests.launch.jobserver import CHECKOUT


@pytest.mark.parametrize(
    ("target", "how"),
    [
        ("megatron.training.training:train_step", "changed"),
        ("megatron.training.utils:print_rank_last", "gone"),
        ("megatron.training.global_vars:_GLOBAL_TENSORBOARD_WRITER", "gone"),
        ("megatron.core.pipeline_parallel.schedules:deallocate_output_tensor", "changed"),
    ],
)
def test_one_message_names_seam_versions_and_remedy(jobs, name, target, how):
    before = [str(CHECKOUT / "tests" / "megatron_lm" / "changed.py"), target, how]
    run = jobs.odyssey(name.replace(":", "-"), before=before, ranks=4, stages=2)
    assert run.exit_code == 2, run.log[-3000:]
    assert "Traceback" not in run.log
    said = f"{target} is {'missing' if how == 'gone' else 'changed'} in megatron-core "
    assert run.log.count(said) == 1, run.log[-3000:]
    message = run.log[run.log.index(said) :]
    assert f"Read in {', '.join(seams.READ)}; jobs ran with {', '.join(compat.TESTED)}" in message
    assert "Use a tested version of Megatron-LM, or train without --odyssey." in message
    assert not run.iterations
