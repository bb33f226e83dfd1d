"""One preloaded process for all jobs of these tests."""

from __future__ import annotations

import importlib.util
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobserver import JobServer

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]

# Before torch is imported: its store client complains, with a C++ stack, of every connection that ends.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

if importlib.util.find_spec("torch"):
    from tests.megatron_lm.jobs import MegatronJobs


def jobs_with(checkout: Path, folder: Path) -> Iterator[MegatronJobs]:
    """Torch and Megatron-LM are imported once; every job is forked from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATRON_LM_PATH", str(checkout))
        server = JobServer.start(["tests.megatron_lm.preload"])
    yield MegatronJobs(server, folder, checkout)
    server.close()


@pytest.fixture(scope="session")
def jobs(megatron_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronJobs]:
    """With the checkout of MEGATRON_LM_PATH."""
    yield from jobs_with(megatron_lm, tmp_path_factory.mktemp("megatron-lm"))


@pytest.fixture(scope="session")
def other_jobs(other_megatron_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MegatronJobs]:
    """With each checkout of MEGATRON_LM_PATHS."""
    yield from jobs_with(other_megatron_lm, tmp_path_factory.mktemp("other-megatron-lm"))


WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho sigma tau".split()
MARKS = ["<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>", "<SPECIAL_233>"]


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Flags of a job that is tuned on 200 samples of one or two conversations each, and the tokenizer for them."""
    pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder, draw = tmp_path_factory.mktemp("conversations"), random.Random(0)
    known = ["<unk>", "</s>", *MARKS, "System", "User", "Assistant", *WORDS]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="</s>", additional_special_tokens=MARKS
    ).save_pretrained(folder)

    def said(role):
        return {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))}

    lines = [
        {"messages": [said(role) for role in ("system", "user", "assistant") * draw.randint(1, 2)]}
        for _ in range(200)
    ]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return (
        f"--sft --data-path {folder / 'chat.jsonl'} --legacy-tokenizer --tokenizer-type SFTTokenizer "
        f"--tokenizer-model {folder} --no-create-attention-mask-in-dataloader --seq-length 48 "
        "--max-position-embeddings 48"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The table of ``test_cases.py``."""
    rows = [
        (report.nodeid.split("[")[1].rstrip("]"), dict(report.user_properties)["cases"], outcome, report)
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and "test_cases.py" in report.nodeid
    ]
    if not rows:
        return
    terminalreporter.section("Megatron-LM's cases")
    for name, cases, outcome, report in sorted(rows, key=lambda row: row[0]):
        why = f": {report.longrepr[2].removeprefix('Skipped: ')}" if outcome == "skipped" else ""
        terminalreporter.write_line(f"{outcome + why:<32} {cases:>2} {name}")
