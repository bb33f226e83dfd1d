#!/usr/bin/env bash
# The main job on this machine's CPUs: a small Llama on 8 ranks, once undisturbed and once being shot at, then
# the report. About a minute on two cores.
#
#   bash examples/llama/demo.sh [FOLDER]      default: odyssey-demo in the current folder
set -euo pipefail
checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$checkout/examples/llama/setup.sh" requirements.txt

out="${1:-$PWD/odyssey-demo}"
mkdir -p "$out"
# The runs are the same each time; a journal of an earlier demo must not be read as part of this one.
rm -rf "$out/undisturbed" "$out/shot-at" "$out/report"

export PYTHONWARNINGS="ignore::UserWarning" # Megatron says of every rank that Transformer Engine is missing

train() { # run-dir, then further flags
  local run_dir="$1"
  shift
  odyssey run --nproc-per-node 8 --preload odyssey_megatron.mcore.cpu.preload \
    "$checkout/examples/llama/pretrain_llama.py" \
    --pipeline-model-parallel-size 4 \
    --num-layers 8 --hidden-size 64 --ffn-hidden-size 192 \
    --num-attention-heads 4 --num-query-groups 2 --seq-length 64 \
    --micro-batch-size 1 --global-batch-size 16 --train-iters 40 --lr 3e-3 \
    --odyssey-device cpu --odyssey-run-dir "$run_dir" "$@"
}

echo "== 1/3 the job, undisturbed: 8 ranks, 4 pipeline stages x 2 pipelines, 40 steps"
train "$out/undisturbed"

# Stage 2 of the second pipeline in its backward; then rank 0; then a rank hangs while gradients are summed.
echo "== 2/3 the same job, shot at: three ranks are lost on the way"
train "$out/shot-at" --odyssey-inject \
  "rank=5,step=7,at=backward;rank=0,step=18,at=forward;rank=6,step=29,at=reduce,signal=STOP"

echo "== 3/3 what happened"
odyssey report "$out/shot-at" --reference "$out/undisturbed" --out "$out/report"
