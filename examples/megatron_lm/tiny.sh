#!/usr/bin/env bash
# Megatron-LM's own pretrain_gpt.py, unedited, with Odyssey: a tiny Llama on 8 CPU ranks that fits a laptop.
#
#     bash examples/megatron_lm/tiny.sh PATH/TO/Megatron-LM [more flags; the last of a kind counts]
set -euo pipefail
megatron="$(cd "${1:?path of a Megatron-LM checkout at core_v0.16.1}" && pwd)"
shift
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONPATH="$megatron${PYTHONPATH:+:$PYTHONPATH}"

model="--num-layers 8 --hidden-size 64 --ffn-hidden-size 192 --swiglu --disable-bias-linear --normalization RMSNorm
  --num-attention-heads 4 --group-query-attention --num-query-groups 2 --position-embedding-type rope
  --seq-length 32 --max-position-embeddings 32 --untie-embeddings-and-output-weights
  --attention-dropout 0 --hidden-dropout 0"
training="--micro-batch-size 1 --global-batch-size 16 --train-iters 12 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2
  --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-interval 6 --eval-iters 2"
data="--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0"
cpu="--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
  --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion"

# shellcheck disable=SC2086 - the variables are lists of flags
exec odyssey run --preload odyssey_megatron.mcore.cpu.preload --nproc-per-node 8 "$megatron/pretrain_gpt.py" \
  --pipeline-model-parallel-size 4 $model $training $data $cpu --odyssey --odyssey-device cpu "$@"
