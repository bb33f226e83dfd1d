"""CI runs all short tests, and of the long ones, which are marked matrix, a few: each time others, drawn by a seed.

python -m pytest --slice SEED              # the short tests, and those that this seed draws
python -m pytest --slice SEED -m matrix    # the drawn ones alone
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

E2E = "tests/e2e/test_"
DRAWS: tuple[tuple[str, ...], ...] = (
    *2 * ((f"{E2E}matrix.py",),),
    *2 * ((f"{E2E}exactness.py",),),
    (f"{E2E}resume.py",),
    (f"{E2E}two_speed.py",),
    (f"{E2E}rejoin.py",),
    (f"{E2E}storms.py",),
    (f"{E2E}context_parallel.py",),
    (f"{E2E}expert_parallel.py",),
    (f"{E2E}tensor_parallel.py",),
    (f"{E2E}megatron.py",),
    (f"{E2E}visits.py",),
    (f"{E2E}apart.py", f"{E2E}corruption.py", f"{E2E}out_of_memory.py"),
    (f"{E2E}experts.py", f"{E2E}future.py", f"{E2E}tied.py"),
    (
        f"{E2E}shrinking.py",
        f"{E2E}readmit.py",
        f"{E2E}drawn_shapes.py",
        f"{E2E}drawn_uneven.py",
        "tests/te/test_example.py",
    ),
    (
        f"{E2E}nodes.py",
        f"{E2E}gpu_script.py",
        "tests/execute/test_emulated.py",
        "tests/surroundings/test_hosts.py",
    ),
    ("tests/launch/test_nodes.py", "tests/launch/test_survival.py", "tests/surroundings/test_signals.py"),
    *2 * (("tests/te/test_modules.py",),),
    ("tests/policy/test_exact_layouts.py", "tests/policy/test_heavier.py"),
    (
        "tests/strict/test_cells.py::test_a_smaller_cell_becomes_whole_again",
        "tests/strict/test_cells.py::test_a_smaller_cell_keeps_slices",
        "tests/strict/test_cells.py::test_gangs_go_on_with_a_step",
        "tests/strict/test_cells.py::test_plans_of_gangs_change_between_steps",
        "tests/strict/test_cells.py::test_what_is_left_of_a_cell_comes_back_smaller",
    ),
    (
        "tests/strict/test_jobs.py::test_killed_while_weights_arrive",
        "tests/strict/test_jobs.py::test_what_has_been_summed_is_not_lost",
    ),
    *2
    * (
        (
            "tests/strict/test_offers.py::test_a_failure_as_a_plan_begins_falls_back_on_what_is_there",
            "tests/strict/test_offers.py::test_a_plan_begins_between_two_steps",
            "tests/strict/test_offers.py::test_killed_on_the_way",
            "tests/strict/test_offers.py::test_what_both_plans_have_use_for_is_not_connected_anew",
        ),
    ),
    ("tests/strict/test_mistakes.py", "tests/strict/test_shared.py::test_changes_between_steps"),
    *2 * (("tests/execute/test_stack.py",),),
)
"""In each draw one of these files, or tests of several cases, is taken by lot, and a test of it."""

DRAWN = 20
"""How many of the draws, taken by lot, are held in a run: with all of them CI would take longer than 20 minutes."""

BY_HAND = (
    "tests/megatron_lm/",  # needs Megatron-LM
    "tests/te/test_cases.py",
    "tests/te/test_megatron_lm.py",
    f"{E2E}leaks.py",  # compare times or what is left over, on a machine that does nothing else
    f"{E2E}slow.py",
    f"{E2E}soak.py",
    "tests/strict/test_cells.py::test_all_random_gangs",  # take hours
    "tests/strict/test_cells.py::test_gangs_killed_as_plans_change",
    "tests/strict/test_cells.py::test_killed_",
    "tests/strict/test_jobs.py::test_all_",
    "tests/strict/test_offers.py::test_killed_anywhere",
    "tests/strict/test_shared.py::test_all_random_jobs",
    "tests/strict/test_shared.py::test_cells_killed_anywhere",
    "tests/strict/test_work.py::test_all_random_jobs",
    "tests/surroundings/test_frozen.py",
    "tests/surroundings/test_last_loss.py",
    "tests/test_fuzz.py",
)
"""Where the names begin of those that no seed draws."""


def drawn(seed: str, names: Iterable[str]) -> set[str]:
    """Of the long tests ``names`` (pytest's, ``file::test[case]``) those that are run. Of what is not among ``names``,
    because other files were asked for, nothing is drawn. Raises ValueError for names that no draw could ever take.
    """
    left = list(names)
    if forgotten := [
        name for name in left if not name.startswith((*BY_HAND, *(one for draw in DRAWS for one in draw)))
    ]:
        raise ValueError(f"neither DRAWS nor BY_HAND of tests/slices.py knows {', '.join(forgotten)}")
    taken: set[str] = set()
    for number in sorted(range(len(DRAWS)), key=lambda number: _lot(seed, number, "")):

        def lot(name: str, number: int = number) -> str:
            return _lot(seed, number, name)

        of = {
            one: [name for name in left if name.startswith(one) and name not in taken]
            for one in DRAWS[number]
        }
        some = [one for one, found in of.items() if found]
        if some and len(taken) < DRAWN:
            taken.add(min(of[min(some, key=lot)], key=lot))
    return taken


def _lot(seed: str, number: int, name: str) -> str:
    return hashlib.sha256(f"{seed} {number} {name}".encode()).hexdigest()
