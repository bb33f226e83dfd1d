"""Every argument of Megatron-LM's is on one of three lists: what works, what is moot, what is refused."""

from __future__ import annotations

import argparse
from collections import Counter

import pytest

from odyssey_megatron import patch
from odyssey_megatron.config import OdysseyConfig
from odyssey_megatron.doctor import flags, launch_line
from odyssey_megatron.doctor.rows import Job
from odyssey_megatron.errors import ConfigError
from odyssey_megatron.upstream import refusals
from odyssey_megatron.upstream.flags import MOOT, WORKS

TAGS = tuple(one.tag for one in patch.supported())
NOT_OF_THE_PARSER = {"kitchen_config_file", "kitchen_recipe_number"}
"""Only where NVIDIA's kitchen is installed."""
SLIPPED = {
    "--hybrid-override-pattern": "M*M*",
    "--is-hybrid-model": "",
    "--linear-attention-freq": "2",
    "--optimizer-cpu-offload": "",
    "--cpu-offloading-num-layers": "2",
    "--fine-grained-activation-offloading": "",
    "--export-kd-cfg": "kd.yaml",
    "--config-logger-dir": "there",
}
"""What once passed in silence."""


def destinations(tag):
    return {one.dest for one in flags.recorded(tag).values()}


@pytest.mark.parametrize("tag", TAGS)
def test_each_argument_of_a_version_is_on_one_list(tag):
    lists = Counter([*WORKS, *MOOT, *refusals.REFUSED])
    assert {dest: lists[dest] for dest in destinations(tag) if lists[dest] != 1} == {}


def test_no_list_has_what_no_version_knows():
    known = set().union(*map(destinations, TAGS)) | NOT_OF_THE_PARSER
    assert {*WORKS, *MOOT, *refusals.REFUSED} - known == set()


def test_a_refusal_says_why_and_from_which_version_on_it_could_work():
    first = {dest: tag for tag in reversed(TAGS) for dest in destinations(tag)}
    for one in refusals.REFUSALS:
        assert one.why.endswith(".")
        assert one.remedy.endswith(".")
        if one.since and one.dest not in NOT_OF_THE_PARSER:
            assert one.since.split()[0] == first[one.dest], one.flag
    (line,) = said(["--fp4-format", "e2m1"])
    assert line.startswith("--fp4-format e2m1 does not work with --odyssey yet: ")
    assert " It could work from core_v0.16.1 with Transformer Engine 2.7 on. Use " in line
    (line,) = said(["--freeze-all-layers"])
    assert line.startswith("--freeze-all-layers is refused with --odyssey: The job trains nothing")


def rows_of(*line):
    return list(flags.rows(Job(config=OdysseyConfig(), flags=line), "0.16.1"))


def test_of_flags_that_work_with_another_one_it_is_not_said_that_they_do_nothing():
    words = (
        "--yarn-original-max-position-embeddings 8 --yarn-beta-fast 2 --no-yarn-correction-range-round-to-int"
    )
    line = f"--position-embedding-type yarn {words} --yarn-beta-slow 0.5".split()
    assert list(flags.rows(Job(config=OdysseyConfig(), flags=tuple(line)), "0.19.1")) == []


@pytest.mark.parametrize("flag", SLIPPED)
def test_flags_that_once_slipped_past(flag):
    found = rows_of(flag, SLIPPED[flag])
    assert [(row.name, row.state) for row in found] == [(flag, "problem")]
    assert found[0].remedy


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--hidden-size abc", "a whole number"),
        ("--hidden-size=1e3", "a whole number"),
        ("--lr 1e", "a number"),
        ("--lr-decay-style cosin --bf16", "one of constant, linear, cosine, inverse-square-root, WSD"),
        ("--num-layers --bf16", "a whole number"),
        ("--normalization Layernorm", "one of LayerNorm, RMSNorm"),
        ("--hidden-size 1024 --lr 1e-4 --lr-decay-style WSD --attention-backend auto", ""),
        ("--hidden-size $SIZE --lr ${LR} /opt/Megatron-LM --num-layers 4 /opt/Megatron-LM", ""),
        ("--tokenizer-model abc", ""),
    ],
)
def test_a_value_that_megatrons_own_parser_does_not_take_is_a_problem(line, expected):
    words = line.split()
    found = [row for row in rows_of(*words) if row.state == "problem"]
    refused = launch_line.judged(words, "0.16.1").refused
    if not expected:
        assert (found, refused) == ([], {})
        return
    (row,) = found
    assert row.found.endswith(f": {expected} is expected by Megatron-LM's own parser.")
    assert refused == {row.name: row.found}


def test_a_value_that_some_version_takes_passes_where_the_version_is_not_known():
    assert refusals.misread(["--optimizer", "lion"], flags.known_to(None)) == {}
    assert refusals.misread(["--optimizer", "lion"], flags.known_to("0.19.0")) == {}
    assert refusals.misread(["--hidden-size", "x"], flags.known_to(None)).keys() == {"--hidden-size"}


def parser_with(*more):
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp4-format", dest="fp4")
    parser.add_argument("--untie-embeddings-and-output-weights", action="store_true", default=True)
    parser.add_argument("--overlap-grad-reduce", action="store_true")
    parser.add_argument("--freeze-all-layers", action="store_true")
    for flag in more:
        parser.add_argument(flag)
    return parser


def said(argv, *more, accepted=(), strict=False):
    parser = parser_with(*more)
    known = refusals.MegatronParser.of(parser, "9.9")
    parser.add_argument("--of-the-script", default="no")  # as a script's extra_args_provider does
    return list(refusals.reasons(parser.parse_args(argv), known, accepted, strict=strict).values())


def test_all_refused_flags_are_named_at_once():
    lines = said(["--fp4-format", "e2m1", "--freeze-all-layers", "--overlap-grad-reduce"])
    assert [line.split()[0] for line in lines] == ["--fp4-format", "--freeze-all-layers"]
    parser = parser_with()
    args = parser.parse_args(["--fp4-format", "e2m1", "--freeze-all-layers"])
    with pytest.raises(ConfigError) as caught:
        refusals.check(args, refusals.MegatronParser.of(parser, "9.9"), ())
    assert str(caught.value).splitlines() == ["2 of the job's flags cannot be used:", *lines]


def test_grouped_experts_of_local_layers_are_refused_alone():
    """In the version that makes them one tensor. Later ones do as if the flag was not there."""
    local, engine = (
        f"--moe-grouped-gemm --transformer-impl {one}" for one in ("local", "transformer_engine")
    )
    for line, version, refused in (
        (local, "0.16.1", True), (engine, "0.16.1", False), (local, None, True),
        (local, "0.17.1", False), (local, "0.18.2", False), (local, "0.19.1", False), (local, "0.20.0", False),
    ):  # fmt: skip
        found = [
            row.name for row in flags.rows(Job(config=OdysseyConfig(), flags=tuple(line.split())), version)
        ]
        assert ("--moe-grouped-gemm" in found) is refused, (line, version)


def test_an_argument_that_nobody_knows_is_refused_once_it_is_given():
    assert said([], "--new-thing") == []
    (line,) = said(["--new-thing", "3"], "--new-thing")
    assert line.startswith("--new-thing is not known to Odyssey, though megatron-core 9.9 has it")
    assert line.endswith("--odyssey-accept new-thing.")
    assert (
        said(["--new-thing", "3"], "--new-thing", accepted=OdysseyConfig(accept="--new-thing").accepted) == []
    )


def test_strict_refuses_what_would_be_ignored():
    """Not what plain Megatron-LM would not read either, nor a value that is what Odyssey does."""
    given = ["--overlap-grad-reduce", "--moe-router-topk", "2", "--rerun-mode", "disabled"]
    more = ("--moe-router-topk", "--rerun-mode")
    assert said(given, *more) == []
    (line,) = said(given, *more, strict=True)
    assert line.startswith("--overlap-grad-reduce changes nothing with --odyssey: ")
    assert line.endswith("leave out --odyssey-strict.")


def test_arguments_of_the_script_pass():
    assert said(["--of-the-script", "yes"]) == []


def test_what_validation_derives_is_looked_at_but_not_taken_for_unknown():
    parser = parser_with("--new-thing")
    args, known = parser.parse_args([]), refusals.MegatronParser.of(parser, "9.9")
    args.new_thing, args.spec = "derived", "local"
    (line,) = refusals.reasons(args, known).values()
    assert line.startswith("--spec local does not work")


def test_the_doctor_names_moot_flags_and_strange_ones():
    argv = ("--overlap-grad-reduce", "--of-the-script", "3", "--odyssey-device", "cpu", "--bf16")
    found = {
        row.name: row.state
        for row in flags.rows(Job(config=OdysseyConfig(), flags=argv), "a version unheard of")
    }
    assert found == {"--overlap-grad-reduce": "ok", "--of-the-script": "warning"}
    strict = Job(config=OdysseyConfig(strict="on"), flags=argv)
    assert next(flags.rows(strict, "0.16.1")).state == "problem"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (
            "--tensor-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0",
            "goes on with fewer",
        ),
        (
            "--context-parallel-size 2 --attention-dropout 0 --hidden-dropout 0",
            "goes on with fewer",
        ),
        (
            "--expert-model-parallel-size 4 --num-experts 8 --log-max-attention-logit",
            "with a divisor of a whole one's",
        ),
        (
            "--expert-model-parallel-size 4 --num-experts 8 --fp8-format hybrid",
            "stand by: it computes in 8 bits",
        ),
        ("--pipeline-model-parallel-size 2", None),
    ],
)
def test_what_becomes_of_broken_cells_is_said(given, found):
    job = Job(config=OdysseyConfig(respawn=1), flags=tuple(given.split()))
    said = [row.found for row in flags.rows(job, None) if row.name == "--odyssey-shrink"]
    assert len(said) == (found is not None)
    assert all(found in one for one in said)
