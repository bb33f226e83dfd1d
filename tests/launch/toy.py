"""A toy training job without Megatron: a ring of messages and an all-reduce a step, and a count that must come out.

    odyssey run [...] toy.py --steps 50 --step-s 0.01 --odyssey-device cpu ...

The state is a counter that every committed step raises by exactly one on every rank. The recovery loop is the
product's, in miniature: agree on the newest committed step, and go on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from odyssey_megatron.cluster.events import Ask
from odyssey_megatron.cluster.job import JobSpec
from odyssey_megatron.codec import to_json
from odyssey_megatron.config import add_arguments, config_from
from odyssey_megatron.errors import ConfigError, Fenced, JobStopped, PeerFailed, Superseded
from odyssey_megatron.launch.rank.environment import journal_of
from odyssey_megatron.launch.rank.injector import Injector
from odyssey_megatron.launch.rank.member import Member
from odyssey_megatron.launch.wire import control as keys
from odyssey_megatron.policy.costs.estimate import estimated_profile
from odyssey_megatron.policy.costs.sizes import AttentionShape, Precision
from odyssey_megatron.rebuild.groups import BURYING, build_groups, init_default_group

MESSAGE = 4096


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--pipeline", type=int, default=2)
    parser.add_argument("--hold", default="", help="do not end before this file exists")
    parser.add_argument("--retry-every", type=int, default=0, help="rank 0 asks for fresh groups so often")
    parser.add_argument("--late", default="", help="do not join the job before this file exists")
    parser.add_argument("--late-rank", type=int, default=-1, help="only this one waits for it")
    parser.add_argument(
        "--deaf", action="store_true", help="stay when the job is stopped, and ignore SIGTERM"
    )
    parser.add_argument("--refuse", default="", help="all ranks refuse the job with this message")
    parser.add_argument("--differ", action="store_true", help="rank 1 posts another job")
    parser.add_argument("--raise-at", type=int, default=-1, help="all ranks raise in this step")
    parser.add_argument("--part-at", type=int, default=-1, help="all ranks lose one another in this step")
    parser.add_argument("--raise-rank", type=int, default=-1, help="only this one does")
    parser.add_argument("--exit-at", default="", help="RANK:STEP:CODE, or all:STEP:CODE")
    parser.add_argument("--stats", default="", help="write resource counts to this file, per generation")
    parser.add_argument(
        "--stop-at-end", type=int, default=-1, help="the rank that stops when it has finished"
    )
    parser.add_argument("--chatter", type=int, default=0, help="bytes that rank 0 prints in each step")
    parser.add_argument("--poison", default="", help="what rank 0 sends in step 5: 'event' or 'offer'")
    add_arguments(parser)
    return parser.parse_args()


def posted_job(*, pipeline: int, steps: int) -> tuple[JobSpec, str]:
    """The job that the coordinator plans for; nothing of it is carried out but the holders of its layers."""
    job = JobSpec(
        num_layers=10,
        pipeline_model_parallel_size=pipeline,
        tensor_model_parallel_size=1,
        num_microbatches=8,
        tokens_per_step=1024,
        train_steps=steps,
    )
    profile = estimated_profile(
        num_transformer_layers=8,
        hidden_size=32,
        ffn_hidden_size=64,
        attention=AttentionShape.grouped(32, 2, 2, 16),
        seq_length=16,
        micro_batch_size=1,
        vocab_size=64,
        precision=Precision(dtype_bytes=4),
    )
    return job, to_json(profile)


class Toy:
    def __init__(self, args: argparse.Namespace):
        self.args, self.config = args, config_from(args)
        self.member = Member.connect(self.config)
        self.rank = self.member.rank
        self.journal = journal_of(self.rank, self.config.run_dir)
        self.member.journal = self.journal
        self.inject = Injector(self.config.injections, self.rank, self.journal)
        self.step = 0
        self.groups, self.ends = None, False
        init_default_group(self.member)

    def post(self) -> None:
        if self.args.refuse:
            raise ConfigError(self.args.refuse)
        pipeline = 1 if self.args.differ and self.rank == 1 else self.args.pipeline
        with self.member.starting.rank_zero_first():
            pass
        self.member.starting.post_job(*posted_job(pipeline=pipeline, steps=self.args.steps))
        self.member.starting.wait_all("ready")

    def enter(self, generation) -> None:
        number, members = generation.number, generation.members
        self.number, self.began = number, self.step
        self.inject.at("groups", step=self.step, generation=number)
        if self.groups is not None:
            self.groups.close()
            self.groups = None
        named = {"world": members}
        for layer_ranks in {tuple(h) for h in generation.plan.layout.holders}:
            named["block:" + "-".join(map(str, layer_ranks))] = layer_ranks
        self.groups = build_groups(self.member, generation.number, named, self.config)
        in_groups_s = time.monotonic()
        newest = torch.tensor([self.step])
        dist.all_reduce(newest, op=dist.ReduceOp.MAX, group=self.groups["world"])
        self.step = int(newest)
        self.member.report_live(number, self.step)
        self.journal.event("recovered", generation=number, step=self.step, dead=list(generation.dead),
                           decide_s=generation.decide_s,
                           in_groups_s=in_groups_s, resumed_s=time.monotonic())  # fmt: skip

    def run_step(self, members: tuple[int, ...]) -> None:
        group, at = self.groups["world"], members.index(self.rank)
        size, x, y = len(members), torch.full((MESSAGE,), float(self.step)), torch.zeros(MESSAGE)
        self.member.look(self.number)
        self.inject.at("forward", step=self.step, generation=self.number)
        self.hold(members)
        if size > 1:
            sent = dist.isend(x, group=group, group_dst=(at + 1) % size, tag=self.step)
            dist.irecv(y, group=group, group_src=(at - 1) % size, tag=self.step).wait()
            sent.wait()
            assert float(y[-1]) == self.step, f"a message of step {float(y[-1])} in step {self.step}"
        time.sleep(self.args.step_s)
        self.inject.at("backward", step=self.step, generation=self.number)
        if self.args.chatter and self.rank == 0:
            print(f"step {self.step}: {'x' * self.args.chatter}", flush=True)
        total = torch.ones(4)
        total[1] = self.member.liveness.asked == Ask.END
        self.inject.at("reduce", step=self.step, generation=self.number)
        dist.all_reduce(total, group=group)
        assert int(total[0]) == size
        self.ends = total[1] > 0
        self.leave_early()
        self.member.liveness.rest(behind_step=True)
        if self.args.poison and self.rank == 0 and self.step == 5:
            self.poison()
        self.step += 1
        if (
            self.args.retry_every
            and self.rank == members[0]
            and self.step - self.began == self.args.retry_every
        ):
            self.member.reports.ask_retry(self.number, "the test wants it")
            while not self.member.newer_than(self.number):
                time.sleep(0.001)

    def hold(self, members: tuple[int, ...]) -> None:
        """The others wait for this rank's message."""
        if self.args.hold and self.rank == members[0] and self.step == self.args.steps - 5:
            open(f"{self.args.hold}.waits", "w").close()
            while not os.path.exists(self.args.hold) and not self.member.newer_than(self.number):
                time.sleep(0.005)

    def poison(self) -> None:
        """What only a program with a mistake sends, since it is sealed: nesting that no parser gets through."""
        control, text = self.member._control, "[" * 100_000
        if self.args.poison == "event":
            control.store.queue_push(keys.EVENTS, control.seal(keys.EVENTS, text))
        else:
            control.put(keys.generation_key(self.number + 1), keys.OFFER + text)

    def meet(self, name: str) -> None:
        """All ranks of the start."""
        control = self.member._control
        control.put(f"toy/{name}/{self.rank}", "")
        names = [f"toy/{name}/{rank}" for rank in range(self.member.world_size)]
        while not control.has(names):
            time.sleep(0.01)

    def leave_early(self) -> None:
        if self.step == self.args.part_at:
            raise PeerFailed("every time")
        if self.step == self.args.raise_at and self.args.raise_rank in (-1, self.rank):
            raise ValueError("nobody can do this step")
        if self.args.exit_at:
            who, step, code = self.args.exit_at.split(":")
            if who in ("all", str(self.rank)) and self.step == int(step):
                if who == "all":  # whoever has not begun the step yet would only lose the others
                    self.meet("leaves")
                print(f"rank {self.rank} leaves with {code}", file=sys.stderr)
                sys.exit(int(code))

    def train(self) -> None:
        number = 0
        while True:
            generation = self.member.next_generation(number)
            number = generation.number
            try:
                self.enter(generation)
                self.record_stats(number)
                while self.step < self.args.steps and not self.ends:
                    self.run_step(generation.members)
                    if len(generation.members) == 1 and self.member.newer_than(number):
                        raise Superseded("alone")
                self.member.finish(number, self.step if self.ends else -1)
                if self.args.stop_at_end == self.rank:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return
            except (Superseded, PeerFailed):
                if self.groups is not None:
                    self.groups.abort()

    def record_stats(self, number: int) -> None:
        if self.args.stats and self.rank == 0:
            with open(self.args.stats, "a") as out:
                out.write(json.dumps({"generation": number, **resources()}) + "\n")


def resources() -> dict[str, int]:
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass
    return {
        "rss_kib": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "fds": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def main() -> None:
    args = arguments()
    if args.late and args.late_rank in (-1, int(os.environ["RANK"])):
        while not os.path.exists(args.late):
            time.sleep(0.005)
    toy = Toy(args)
    try:
        toy.post()
        toy.train()
    except ConfigError as error:
        toy.member.refuse(error)
    except JobStopped as stop:
        toy.journal.event("stopped", why=str(stop), exit_code=stop.exit_code)
        if args.deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        sys.exit(stop.exit_code)
    except Fenced:
        sys.exit(1)
    except Exception as error:
        toy.member.fail(error)
        raise
    if toy.args.stats:
        toy.groups.close()
        while any(thread.name == BURYING for thread in threading.enumerate()):
            time.sleep(0.2)
        time.sleep(0.5)
        toy.record_stats(-1)
    toy.journal.event("step_committed", step=toy.step)


if __name__ == "__main__":
    main()
