#!/usr/bin/env bash
# A rank that is slow, and not dead: the job of demo.sh on 4 ranks (2 where there are fewer than 4 cores), once
# undisturbed, and once with 70 % of the CPU of the last rank taken away for 40 steps. It is found, gets less to do, and
# gets it back; the losses stay the same. It wants a machine with nothing else to do: three minutes there.
#
#   bash examples/llama/slow.sh [FOLDER [FLAG...]]      default: odyssey-slow in the current folder
#
# FLAG: of the slowed job, as --odyssey-page-port 8080, to see it on a page.
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$checkout/examples/llama/setup.sh" requirements.txt

out="${1:-$PWD/odyssey-slow}"
shift $(($# > 0))
mkdir -p "$out"
rm -rf "$out/undisturbed" "$out/slowed" "$out/report"
export PYTHONWARNINGS="ignore::UserWarning" OMP_NUM_THREADS=1

if (($(nproc) >= 4)); then ranks=4 stages=2; else ranks=2 stages=1; fi
slow=$((ranks - 1))

train() { # run-dir, then further flags
  local run_dir="$1"
  shift
  odyssey run --nproc-per-node $ranks --preload odyssey_megatron.mcore.cpu.preload \
    "$checkout/examples/llama/pretrain_llama.py" \
    --pipeline-model-parallel-size $stages \
    --num-layers 8 --hidden-size 64 --ffn-hidden-size 192 \
    --num-attention-heads 4 --num-query-groups 2 --seq-length 64 \
    --micro-batch-size 1 --global-batch-size 16 --train-iters 120 --lr 3e-3 \
    --odyssey-device cpu --odyssey-float64 on --odyssey-run-dir "$run_dir" "$@"
}

reached() { # step, of the job that is slowed
  until grep -qs "\"step_committed\".*\"step\":$1," "$out"/slowed/journal/*.jsonl; do
    kill -0 "$job" 2>/dev/null || return 0
    sleep 0.1
  done
}

echo "== 1/3 the job, undisturbed: $ranks ranks, $stages pipeline stage(s) x 2 pipelines, 120 steps"
train "$out/undisturbed"

echo "== 2/3 the same job; from step 20 to step 60 rank $slow runs for three tenths of the time"
train "$out/slowed" --odyssey-rebalance auto --odyssey-profile-steps 2 "$@" &
job=$!
reached 20
odyssey inject "$out/slowed" --rank "$slow" --slow 3.3 &
robber=$!
reached 60
odyssey top "$out/slowed" --once || true
kill "$robber" 2>/dev/null || true
wait "$job"

echo "== 3/3 what happened"
grep -h '"slowness"' "$out"/slowed/journal/*.jsonl | grep -o '"kind".*' || echo "nothing was found: is the machine busy?"
odyssey report "$out/slowed" --reference "$out/undisturbed" --out "$out/report"
