"""Shared by all tests. Tests that need torch or megatron import them themselves, so that the pure ones run without."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from odyssey_megatron.studies import progress
from tests.slices import drawn

if TYPE_CHECKING:
    from tests.e2e.jobs import Jobs
    from tests.launch.jobserver import Job, JobServer

NEEDS_MEGATRON_LM = (
    "needs Megatron-LM: set MEGATRON_LM_PATH to a checkout of core_v0.16.1 "
    "(and MEGATRON_LM_PATHS to others, separated by ':')"
)


with contextlib.suppress(ImportError):  # a machine for other tests may be without
    import hypothesis

    # A test says what is right, and not how long that takes on a machine that does other things besides.
    hypothesis.settings.register_profile(
        "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("untimed")


progress.EVERY_S = 1e6  # how long a command takes is not what tests are about


def megatron_lm_checkouts() -> list[Path]:
    """Those that the two variables name, that of MEGATRON_LM_PATH first."""
    named = [os.environ.get("MEGATRON_LM_PATH", ""), *os.environ.get("MEGATRON_LM_PATHS", "").split(":")]
    return [Path(one) for one in dict.fromkeys(named) if one]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice", metavar="SEED", help="of the tests marked matrix, too, a few: tests/slices.py"
    )
    parser.addoption(
        "--pairs",
        action="store_true",
        help="jobs of tests/e2e have a group for each (sender, receiver), as on NCCL",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--slice`` the long tests that its seed draws are run, too, or, with ``-m matrix``, by themselves."""
    if seed := config.getoption("--slice"):
        long = {item.nodeid for item in items if item.get_closest_marker("matrix")}
        try:
            others = long - drawn(seed, sorted(long))
        except ValueError as error:
            raise pytest.UsageError(f"--slice: {error}") from None
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]
        if config.option.markexpr == "not matrix":  # pyproject.toml's
            config.option.markexpr = ""


def pytest_generate_tests(metafunc: Any) -> None:
    """A test that takes ``any_megatron_lm`` runs with each checkout, or is skipped once.

    ``other_megatron_lm``: with each but that of MEGATRON_LM_PATH.
    """
    checkouts = megatron_lm_checkouts()
    others = [one for one in checkouts if str(one) != os.environ.get("MEGATRON_LM_PATH")]
    skipped = pytest.param(None, marks=pytest.mark.skip(reason=NEEDS_MEGATRON_LM))
    for name, given in (("any_megatron_lm", checkouts), ("other_megatron_lm", others)):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, given or [skipped], ids=lambda one: one and one.name, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A model of Megatron's leaves its choice of attention in the environment. It ends with its test."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How many tests a checkout would add."""
    skipped = sum(NEEDS_MEGATRON_LM in str(one.longrepr) for one in terminalreporter.stats.get("skipped", ()))
    if skipped:
        terminalreporter.write_line(f"skipped: {skipped}; each {NEEDS_MEGATRON_LM}")


@pytest.fixture(scope="session")
def megatron_lm() -> Path:
    """A Megatron-LM checkout at core_v0.16.1, not to be written to."""
    if not os.environ.get("MEGATRON_LM_PATH"):
        pytest.skip(NEEDS_MEGATRON_LM)
    return Path(os.environ["MEGATRON_LM_PATH"])


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The repository root."""
    return Path(__file__).parent.parent


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Jobs]:
    """One process imports torch and Megatron; every job of the session is forked from it."""
    from tests.e2e.jobs import PAIRS, SCRIPT, Jobs
    from tests.launch.jobserver import JobServer

    server, example = (
        JobServer.start(["tests.e2e.preload"]),
        PAIRS if pytestconfig.getoption("pairs") else SCRIPT,
    )
    yield Jobs(server=server, folder=tmp_path_factory.mktemp("jobs"), example=example)
    server.close()


@pytest.fixture(scope="session")
def server() -> Iterator[JobServer]:
    """One preloaded process for all toy jobs."""
    from tests.launch.jobserver import JobServer

    server = JobServer.start(["tests.launch.preload"])
    yield server
    server.close()


@pytest.fixture
def toy(server: JobServer, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a toy job: ``toy(ranks, "--steps", 20, ...)``. Its journal is in ``tmp_path / "run"``."""
    from tests.launch.jobserver import CHECKOUT

    jobs = []

    def start(ranks: int, *arguments: object, launch: tuple[object, ...] = (), **env: str) -> Job:
        argv = ["--nproc-per-node", ranks, *launch, CHECKOUT / "tests/launch/toy.py", *arguments]
        argv += ["--odyssey-device", "cpu", "--odyssey-run-dir", tmp_path / "run"]
        job = server.run(argv, log=tmp_path / f"log{len(jobs)}", env=env)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        if job.process.poll() is None:
            job.kill()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A folder name for the test at hand; those of other files may be called as it is."""
    test = request.node.name.replace("[", "-").replace("]", "").replace("/", "-")
    return f"{request.path.stem.removeprefix('test_')}-{test}"
