"""What a failure costs without Odyssey: the stock job under torchrun, shot once, restarted from its last
checkpoint.

    torchrun --nproc-per-node 8 --max-restarts 1 restart_job.py FOLDER STEP RANK [flags of pretrain_llama.py]

Every rank saves after every step (so no work is lost: the kindest case for a restart). RANK kills itself in
STEP. Writes ``killed`` and ``resumed`` (monotonic seconds: the SIGKILL, and the first instruction of the
step done again) to FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))

import stock_megatron
from stock_megatron import StockTrainer, mpu, pretrain_llama


def main() -> None:
    folder, victim_step, victim = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.argv[1:4] = []
    args = pretrain_llama.parse_arguments()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    restarted = attempt > 0
    # The agent's store outlives the restart (torch 2.13, --standalone), and with it the addresses of dead processes:
    # without a prefix the new ranks would connect to those.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store = dist.PrefixStore(f"attempt{attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mpu.initialize_model_parallel(1, args.pipeline_model_parallel_size)
    trainer = StockTrainer(args, pretrain_llama.build_dataset(args, str(folder)))
    checkpoint = folder / f"rank{rank}.pt"
    step = 0
    if restarted:
        saved = torch.load(checkpoint, weights_only=True)
        trainer.load(saved["state"])
        step = saved["step"]
        dist.barrier()
        (folder / f"resumed.{rank}").write_text(str(time.monotonic()))
    while step < args.train_iters:
        if (rank, step, restarted) == (victim, victim_step, False):
            (folder / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step()
        step += 1
        torch.save({"state": trainer.state(), "step": step}, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").rename(checkpoint)
        dist.barrier()


if __name__ == "__main__":
    assert stock_megatron  # the CPU device, before Megatron
    main()
