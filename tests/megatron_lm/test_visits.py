"""Checkpoints of jobs whose routes visit workers twice: what is saved while ranks die goes on in any layout."""

from __future__ import annotations

import pytest

from tests.e2e.jobs import assert_equal_numbers, assert_holders_agree
from tests.e2e.test_visits import SLICED, UNMEASURED, Case, assert_visits
from tests.megatron_lm.jobs import FLOAT64, MOCK

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(400)]

JOB = f"{MOCK} --num-layers 6 --odyssey-float64 on"
CASES = {
    # routes of the job that saves, how its state is kept, who dies there; the same of the job that goes on
    "turning": ("turning", "", (2, 4), "interleaved", SLICED, (0, 3)),
    "turning-sliced": ("turning", SLICED, (1, 3), "turning", "", (0, 5)),
    "interleaved": ("interleaved", "", (0, 3), "turning", SLICED, (2, 4)),
    "interleaved-sliced": ("interleaved", SLICED, (1, 4), "interleaved", "", (0, 3)),
}


@pytest.fixture(scope="module")
def undisturbed(jobs):
    """In stages in a row, and as many as the others' launch lines have: Megatron draws first weights by them."""
    return jobs.odyssey("visits-undisturbed", JOB, ranks=3, stages=3)


@pytest.mark.parametrize("case", CASES)
def test_saved_and_loaded_while_ranks_die(jobs, undisturbed, name, tmp_path, case):
    """In both jobs one rank dies in a step, and one with the others, in the save or as soon as it has loaded."""
    routes, kept, (first, second), others, their_kept, (third, fourth) = CASES[case]
    saved = jobs.folder / f"{name}-saved"

    def run(which, routes, flags, inject):
        profile = Case(routes=routes, state="replicated", inject="").profile(tmp_path / f"{which}.json")
        found = jobs.odyssey(
            f"{name}-{which}", f"{JOB} {flags} --odyssey-layout auto --odyssey-profile {profile}",
            ranks=6, stages=3, before=[str(UNMEASURED)], inject=inject,
        )  # fmt: skip
        assert found.exit_code == 0, found.log[-4000:]
        assert len(found.killed) == 2, found.killed
        assert_visits(found.named("decision")[0], routes)
        assert_holders_agree(found)
        return found

    run(
        "saves", routes, f"{kept} --save {saved} --save-interval 3 --exit-interval 3",
        f"rank={first},step=1,at=backward;rank={second},step=3,at=checkpoint",
    )  # fmt: skip
    going_on = run(
        "goes-on", others, f"{their_kept} --load {saved}",
        f"rank={third},step=3,at=forward;rank={fourth},step=4,at=optimizer",
    )  # fmt: skip
    in_a_row = jobs.odyssey(f"{name}-in-a-row", f"{JOB} --load {saved}", ranks=2, stages=2)
    for one in (going_on, in_a_row):
        assert_equal_numbers(one.run.steps, undisturbed.run.steps[3:], rel=FLOAT64)
