"""Formats and command lines against random damage: an answer or one paragraph, soon, and no script in a page.

Soon is within ten seconds.

A few hundred inputs each run with the suite, 20,000 with ``-m matrix``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odyssey_megatron import cli
from odyssey_megatron.cluster.state import initial_state
from odyssey_megatron.codec import from_json, to_json, to_jsonable
from odyssey_megatron.config import OdysseyConfig, config_from, config_from_argv, fields, flag_of, variable_of
from odyssey_megatron.doctor.launch_line import judged, read_job
from odyssey_megatron.errors import ConfigError, LayoutInvalid, ScheduleInvalid
from odyssey_megatron.faults import INJECTION_POINTS, Injection, Slowdown, SlowLink, parse_injections
from odyssey_megatron.metrics import page
from odyssey_megatron.metrics.plots import Picture
from odyssey_megatron.metrics.run import read_run, summary, text_summary
from odyssey_megatron.plan.checking.verify import verify
from odyssey_megatron.plan.plan import Plan
from odyssey_megatron.policy.initial import initial_plan
from odyssey_megatron.studies.trace import FailureTrace, read_trace
from odyssey_megatron.watch import page as watch_page
from odyssey_megatron.watch.exposition import exposition
from odyssey_megatron.watch.screen import frame
from tests.metrics.synthetic_run import Clock, SyntheticRun
from tests.studies.test_trace import WORLD

LIMIT_S = 20.0
MANY = pytest.mark.matrix, pytest.mark.timeout(7200)


def amounts(some: int, many: int = 20_000) -> Any:
    """How many inputs: in the suite, and with ``-m matrix``."""
    return pytest.mark.parametrize("examples", [some, pytest.param(many, marks=MANY)])


def fuzz(examples: int, given_by: st.SearchStrategy[Any], test: Callable[[Any], None]) -> None:
    """Calls ``test`` with so many inputs; each must end in time, by the clock of this process."""

    def timed(value: Any) -> None:
        began_s = time.process_time()
        test(value)
        assert time.process_time() - began_s < LIMIT_S

    profile = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    profile(given(given_by)(timed))()


SCRIPT = "<script>alert(1)</script>"
TEXTS = st.text(max_size=20) | st.sampled_from(
    [
        SCRIPT, '"><img src=x onerror=alert(1)>', "' onload='x", "&lt;script&gt;", "</style><svg/onload=x>", "]]>",
        "javascript:x", "$\\frac{", "\x1b[31m\x1b]0;x\x07", "\x00", "\ud800", "𝔘🔥", "a\nb\r\n",
        "x" * 10_000, "", "NaN",
        "-1", "%s%n{}",
    ]
)  # fmt: skip
NUMBERS = (
    st.sampled_from([0, -1, 1, 2, 7, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**400), True, False])
    | st.sampled_from([0.0, -0.0, 5e-324, 1e-300, -1e-9, 1e308, math.inf, -math.inf, math.nan])
    | st.integers(-3, 20)
    | st.floats()
)
VALUES = st.recursive(
    st.none() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
BYTES = st.sampled_from(
    [b"", b"\x00", b"\xff", b"\r\n", b"[" * 5000, b"{", b'"', b"1e999", b"\xef\xbb\xbf", b"<"]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to everything in a JSON value."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for position, inner in enumerate(value[:3]):
            yield from places(inner, (*path, position))


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """``value`` with ``new`` at ``path``; ``KeyError`` takes it out."""
    if not path:
        return None if new is KeyError else new
    inner = put(value[path[0]], path[1:], new) if len(path) > 1 or new is not KeyError else KeyError
    if isinstance(value, dict):
        return {
            key: inner if key == path[0] else one
            for key, one in value.items()
            if not (key == path[0] and inner is KeyError)
        }
    return [
        inner if position == path[0] else one
        for position, one in enumerate(value)
        if not (position == path[0] and inner is KeyError)
    ]


@st.composite
def damaged(draw: Any, whole: Any) -> bytes:
    """The JSON of ``whole`` with values replaced or taken out, and sometimes with bytes replaced."""
    for _ in range(draw(st.integers(0, 3))):
        path = draw(st.sampled_from(list(places(whole))))
        whole = put(whole, path, draw(VALUES | st.just(KeyError)))
    return draw(torn(json.dumps(whole).encode()))


@st.composite
def torn(draw: Any, text: bytes) -> bytes:
    if draw(st.integers(0, 3)) == 0 and text:
        at = draw(st.integers(0, len(text) - 1))
        text = text[:at] + draw(BYTES | st.binary(max_size=4)) + text[at + draw(st.integers(0, 5)) :]
    return text


# -- the journal


class Elements(HTMLParser):
    """All elements of a page and their attributes must be the page's own."""

    OWN: ClassVar = {
        "html": {"lang"}, "meta": {"charset", "name", "content"}, "title": set(), "style": set(), "body": set(),
        "picture": set(), "source": {"media", "srcset"}, "img": {"alt", "src"}, "table": {"class"}, "tr": {"class"},
        "td": {"class", "title"}, "th": {"class"}, "p": {"class"}, "div": {"class"}, "b": set(), "span": {"class"},
        "code": {"title"}, "section": set(), "h1": set(), "h2": set(), "h3": set(), "br": set(), "header": set(),
        "svg": {"viewbox", "preserveaspectratio", "height"}, "rect": {"class", "x", "y", "width", "height"},
    }  # fmt: skip
    CLASSES: ClassVar = {"", "muted", "facts", "good", "bad", "n", "n total", " total", "chosen"}
    CLASSES |= {
        "map",
        "map dense",
        "col",
        "dead",
        "shadow",
        "waits",
        "joins",
        "unknown",
        "bar",
        "slowbar",
        "columns",
    }
    CLASSES |= {*(f"h{heat}" for heat in range(6)), "legend", "pill ", "pill recovering"}

    def handle_starttag(self, tag, attrs):
        assert tag in self.OWN
        assert {name for name, _ in attrs} <= self.OWN[tag]
        for name, value in attrs:
            if name in ("src", "srcset"):
                assert value.startswith("data:image/png;base64,")
            if name == "class":
                assert value in self.CLASSES

    def handle_startendtag(self, tag, attrs):
        raise AssertionError(tag)

    def handle_comment(self, data):
        raise AssertionError(data)

    handle_pi = unknown_decl = handle_comment


def check_page(text: str) -> None:
    elements = Elements(convert_charrefs=True)
    elements.feed(text)
    elements.close()


def drawn(name: str, title: str = "x") -> Picture:
    return Picture(name=name, title=title, caption="", light=b"", dark=b"")


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    """Lines of a run with a failure, a few of each event."""
    folder = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        from odyssey_megatron.metrics import journal as module

        clock = Clock()
        patch.setattr(module, "time", clock)
        run = SyntheticRun(folder, clock, with_failures=True)
        run.write()
        for one in (run.agent, *run.ranks.values()):
            one.close()
    lines = [
        json.loads(row)
        for file in sorted((folder / "journal").iterdir())
        for row in file.read_text().splitlines()
    ]
    lines = [one for one in lines if one["step"] in (-1, 5, 6, 7, 9, 10, 13, 14)]
    for one in lines:
        if "instructions" in one:
            one["instructions"] = one["instructions"][:4]
    return sorted(lines, key=lambda one: one["wall_s"])


@st.composite
def damaged_journals(draw: Any, lines: list[dict[str, Any]]) -> bytes:
    hit = draw(st.lists(st.integers(0, len(lines) - 1), max_size=3))
    rows = [
        draw(damaged(one)) if number in hit else json.dumps(one).encode() for number, one in enumerate(lines)
    ]
    return draw(torn(b"\n".join(rows) + b"\n"))


@amounts(80)
def test_journals(journal, tmp_path, examples):
    file = tmp_path / f"run{SCRIPT.replace('/', '')}" / "journal" / "rank0.jsonl"
    file.parent.mkdir(parents=True)
    read = []

    def test(text: bytes) -> None:
        file.write_bytes(text)
        try:
            run = read_run(file.parent.parent)
        except ConfigError:
            return
        read.append(run)
        json.dumps(summary(run, run), allow_nan=False)
        text_summary(run, run)
        check_page(page.html(run, run, [drawn("loss"), drawn("step_time"), drawn("schedule_1", SCRIPT)]))
        check_page(watch_page.part(run.state))
        assert all(line.isprintable() for line in frame(run.state, now_s=0.0, colours=False).split("\n"))
        exposition(run.state)

    fuzz(examples, damaged_journals(journal), test)
    assert len(read) > examples / 10


@amounts(1, 300)
def test_journals_with_pictures(journal, tmp_path, examples):
    file = tmp_path / "run" / "journal" / "rank0.jsonl"
    file.parent.mkdir(parents=True)

    def test(text: bytes) -> None:
        file.write_bytes(text)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = cli.main(["report", str(file.parent.parent), "--out", str(tmp_path / "out")])
        assert code in (0, 2)
        if code == 0:
            check_page((tmp_path / "out" / "index.html").read_text())

    fuzz(examples, damaged_journals(journal), test)


# -- profile, trace, plan


SMALL = replace(WORLD.profile, costs=replace(WORLD.profile.costs, link_bytes_per_s=1e9, memory_bytes=10_000))


def answer(*argv: str) -> int:
    """The exit code of a command; what it says about bad input is one paragraph."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(list(argv))
        except SystemExit as end:  # --help
            code = end.code
    assert code in (0, 2, 93), (code, err.getvalue())
    assert (code == 2) == (err.getvalue().count("\n") == 1), err.getvalue()
    assert "Traceback" not in err.getvalue()
    return code


@amounts(60)
def test_profiles(tmp_path, examples):
    path = tmp_path / "profile.json"
    codes = []

    def test(text: bytes) -> None:
        path.write_bytes(text)
        codes.append(answer("plan", "--profile", str(path), "--cluster", "2x2", "--pipeline-model-parallel-size", "2",
                            "--num-microbatches", "2", "--kill", "1", "--width", "40"))  # fmt: skip

    fuzz(examples, damaged(to_jsonable(SMALL)), test)
    assert set(codes) >= {0, 2}


WORDS = TEXTS.map(str) | NUMBERS.filter(lambda one: abs(one) < 1e300 if one == one else True).map(str)
LINES = (
    st.builds(
        lambda t, what, worker: f"{t} {what} {worker}",
        st.integers(0, 30) | WORDS,
        st.sampled_from(["kill", "join"]),
        st.integers(0, 4) | WORDS,
    )
    | st.builds(lambda t: f"{t} end", st.sampled_from([40, 100, "1e9", "inf", "nan", "-1"]))
    | WORDS
)
TRACES = st.builds(
    lambda lines, end, join: join.join([*lines, *end]),
    st.lists(LINES, max_size=6),
    st.sampled_from([[], ["40 end"]]),
    st.sampled_from(["\n", "\r\n", "\n\n# x\n"]),
)


@amounts(300)
def test_traces(examples):
    read = []

    def test(text: str) -> None:
        try:
            read.append(read_trace(text, 4, gpus_per_node=2))
        except ValueError:
            return

    fuzz(examples, TRACES, test)
    assert all(isinstance(one, FailureTrace) and 0 < one.duration_s < math.inf for one in read)
    assert read


@amounts(10, 2000)
def test_traces_are_played(tmp_path, examples):
    path = tmp_path / "trace"
    profile = tmp_path / "profile.json"
    SMALL.save(profile)

    def test(text: str) -> None:
        path.write_bytes(text.encode(errors="replace"))
        answer("simulate", "--trace", str(path), "--profile", str(profile), "--cluster", "2x2",
               "--pipeline-model-parallel-size", "2", "--num-microbatches", "2")  # fmt: skip

    fuzz(examples, TRACES, test)


@amounts(150)
def test_plans(examples):
    whole = initial_plan(replace(WORLD.job, num_microbatches=4), initial_state(nodes=(0,) * 8), WORLD.profile)
    read = []

    def test(text: bytes) -> None:
        try:
            plan = from_json(Plan, text)
            assert isinstance(plan, Plan)
            assert from_json(Plan, to_json(plan)).hash() == plan.hash()
            verify(plan.layout.check(), plan.schedule)
        except (ValueError, LayoutInvalid, ScheduleInvalid):
            return
        read.append(plan)

    fuzz(examples, damaged(to_jsonable(whole)), test)
    assert read


# -- flags and variables


@amounts(300)
def test_injections(examples):
    items = st.builds(
        lambda key, sign, value: f"{key}{sign}{value}",
        st.sampled_from(
            ["rank", "step", "at", "signal", "microbatch", "generation", "incarnation", "slow", "until"]
        )
        | TEXTS,
        st.sampled_from(["=", "==", "", " = "]),
        st.sampled_from(INJECTION_POINTS) | st.integers(-2, 9) | st.floats() | WORDS,
    )
    texts = st.lists(
        st.just("rank=1,step=2,at=forward") | st.lists(items, max_size=5).map(",".join), max_size=3
    )

    def test(text: str) -> None:
        with contextlib.suppress(ConfigError):
            assert all(isinstance(one, Injection | Slowdown | SlowLink) for one in parse_injections(text))

    fuzz(examples, texts.map(";".join), test)


@amounts(200)
def test_flags_and_variables_of_a_job(examples):
    settings_ = st.sampled_from(fields(OdysseyConfig))
    values = st.sampled_from(["1", "0.5", "recover", "auto", "on", "100"]) | WORDS

    def test(pairs: Any) -> None:
        argv = [word for one, value in pairs for word in (flag_of(one), value)]
        environ = {variable_of(one): value for one, value in pairs}
        for made in (lambda: config_from_argv(argv), lambda: config_from(argparse.Namespace(), environ)):
            try:
                config = made()
            except ConfigError:
                continue
            numbers = [getattr(config, one.name) for one in fields(config)]
            assert all(math.isfinite(one) for one in numbers if isinstance(one, float))

    fuzz(examples, st.lists(st.tuples(settings_, values), max_size=3), test)


SCRIPT = """
A=(--num-layers 3 $X "--b c")
O=" \\
 --bf16 --fp8-format ${F:-hybrid}"
R="python pretrain_gpt.py $O `id`"
sh -c "$R" && torchrun $(x "y") pretrain_gpt.py "${A[@]}" $O --split '1,2' # end
"""


@amounts(300)
def test_launch_scripts(tmp_path, examples):
    path = tmp_path / "job.sh"
    found = []
    words = st.sampled_from(
        ["(", ")", "$(", '"', "'", "\n", "A+=(${A[@]})\n", "O=$O$O\n", "`", "\\", "${", " x.py "]
    )
    torn_scripts = st.lists(st.tuples(st.integers(0, len(SCRIPT)), words | WORDS), max_size=4)

    def test(inserts: Any) -> None:
        text = SCRIPT
        for at, word in inserts:
            text = text[:at] + word + text[at:]
        path.write_bytes(text.encode(errors="replace"))
        try:
            found.append(judged(read_job(str(path)).flags).starts)
        except ConfigError:
            found.append(None)

    fuzz(examples, torn_scripts, test)
    assert set(found) == {True, False, None}


FLAGS = {
    "plan": ("--kill", "--slow", "--policy", "--mtbf-s", "--horizon-s", "--width", "--json"),
    "simulate": ("--interval-s", "--mtbf-s", "--repair-s", "--duration-s", "--losses", "--group-build-s", "--seed",
                 "--node-share", "--start-s", "--odyssey-respawn", "--odyssey-shrink"),
}  # fmt: skip
OF_BOTH = (
    "--cluster", "--model", "--accelerator", "--profile", "--pipeline-model-parallel-size", "--micro-batch-size",
    "--tensor-model-parallel-size", "--use-distributed-optimizer", "--num-microbatches", "--nonsense",
    "--odyssey-redundancy", "--job", "--vocab-size",
)  # fmt: skip


@amounts(60, 5000)
@pytest.mark.parametrize("command", FLAGS)
def test_command_lines(command, tmp_path, examples):
    profile = tmp_path / "profile.json"
    SMALL.save(profile)
    values = st.sampled_from(["1", "2", "0", "-1", "1x4", "2x2", "0x0", "0:1", "1:0=0.5", "600", "1e5", "nan", "h100",
                              "", "99999999999x8", os.devnull, str(tmp_path)]) | WORDS  # fmt: skip
    flags = st.sampled_from((*FLAGS[command], *OF_BOTH))
    start = [command, "--profile", str(profile), "--cluster", "2x2", "--pipeline-model-parallel-size", "2"]
    start += ["--interval-s", "7200"] if command == "simulate" else []  # one trace, and not four
    codes = []

    def test(pairs: Any) -> None:
        more = [
            word
            for flag, value in pairs
            for word in ([flag] if flag in ("--json", "--use-distributed-optimizer") else [f"{flag}={value}"])
        ]
        codes.append(answer(*start, "--num-microbatches", "2", *more))

    fuzz(examples, st.lists(st.tuples(flags, values), max_size=3), test)
    assert set(codes) >= {0, 2}
