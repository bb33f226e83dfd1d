"""How long a failure stops the job: kill a rank for real, many times; beside, restart the whole job from a
checkpoint.

8 CPU ranks (PP4 x DP2) train the example's Llama; in each run one rank is killed by SIGKILL at a point of a
step, and the journal says when each survivor noticed, was in its new groups, and ran the next instruction.
Then the same model under Megatron-Core and torchrun: one rank killed, everything restarted from the
checkpoint of the step before.

    python tests/benchmarks/recovery.py [--ranks 8] [--kills 12] [--json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(CHECKOUT), str(Path(__file__).parent)]

from bars import at_least, at_most, finish, summarize, taken

from odyssey_megatron.metrics.recoveries import RecoveryRecord
from odyssey_megatron.metrics.run import read_run
from tests.launch.jobserver import ENVIRONMENT, JobServer

STAGES, STEP = 4, 3
POINTS = ("forward", "backward", "weight_grad", "reduce", "agreement", "optimizer")
MODEL = (
    f"--pipeline-model-parallel-size {STAGES} --num-layers 8 --hidden-size 64 --ffn-hidden-size 192 "
    "--num-attention-heads 4 --num-query-groups 2 --seq-length 64 --micro-batch-size 1 --global-batch-size 16 "
    "--train-iters 6 --lr-warmup-iters 1 --odyssey-device cpu"
).split()


def shoot(
    server: JobServer, folder: Path, ranks: int, policy: str, victim: int, point: str
) -> RecoveryRecord:
    """One job, one kill; what the recovery took."""
    script = CHECKOUT / "examples" / "llama" / "pretrain_llama.py"
    argv = [
        "--nproc-per-node",
        ranks,
        script,
        *MODEL,
        "--odyssey-policy",
        policy,
        "--odyssey-run-dir",
        folder,
    ]
    argv += ["--odyssey-inject", f"rank={victim},step={STEP},at={point}"]
    job = server.run(argv, log=folder.with_suffix(".log"), env=ENVIRONMENT)
    if job.wait(120) != 0:
        raise RuntimeError(job.log()[-3000:])
    (recovery,) = read_run(folder).recoveries
    return recovery


def restart_s(folder: Path, ranks: int, victim: int) -> float:
    """SIGKILL -> first instruction of the step done again, under torchrun with a checkpoint after every step."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [
        "--max-restarts",
        "1",
        "--monitor-interval",
        "0.1",
        str(Path(__file__).parent / "restart_job.py"),
    ]
    command += [str(folder), str(STEP), str(victim), *MODEL]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    resumed_s = [float(path.read_text()) for path in folder.glob("resumed.*")]
    return max(resumed_s) - float((folder / "killed").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--kills", type=int, default=12, help="with the layout kept (reroute); half as many replan"
    )
    parser.add_argument("--restarts", type=int, default=2)
    args = parser.parse_args()
    found: dict[str, list[RecoveryRecord]] = {"reroute": [], "replan": []}
    with tempfile.TemporaryDirectory() as name:
        folder, server = Path(name), JobServer.start(["tests.e2e.preload"])
        for policy, kills in (("reroute", args.kills), ("replan", args.kills // 2)):
            for kill in range(kills):
                victim, point = (3 * kill) % args.ranks, POINTS[kill % len(POINTS)]
                one = shoot(server, folder / f"{policy}{kill}", args.ranks, policy, victim, point)
                found[policy].append(one)
                print(f"{policy} rank {victim} at {point}: {one}", file=sys.stderr, flush=True)
        server.close()
        restarts = [restart_s(folder / f"restart{i}", args.ranks, 5) for i in range(args.restarts)]
    result = {"ranks": args.ranks, "restart_s": summarize(restarts)}
    for policy, rows in found.items():
        for field in (
            "detect_s",
            "decide_s",
            "abort_s",
            "groups_s",
            "agree_s",
            "transfer_s",
            "in_groups_s",
            "stall_s",
        ):
            values = [taken(getattr(one, field), f"{field} of a recovery") for one in rows]
            result[f"{policy}_{field}"] = summarize(values)
    stall_s = result["reroute_stall_s"]["median"]
    bars = [
        at_least("kills", len(found["reroute"]), 10),
        at_most("detect_s (median)", result["reroute_detect_s"]["median"], 0.05),
        at_most(
            "all survivors in their new groups, s (median)", result["reroute_in_groups_s"]["median"], 0.15
        ),
        at_most("reroute stall, s (median)", stall_s, 0.5),
        at_least("restart / reroute stall", statistics.median(restarts) / stall_s, 20),
    ]
    return finish(result, bars, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
