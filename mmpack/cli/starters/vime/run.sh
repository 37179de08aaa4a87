#!/bin/bash
# Make the rows, then train, with a checkout of vime and Ray running: VIME_DIR=… MEGATRON_DIR=… MODEL=… bash run.sh
# Options after it go to vime. What is not here is vime's default.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
: "${VIME_DIR:?the folder of your checkout of vime}" "${MEGATRON_DIR:?the folder of your checkout of Megatron-LM}"
: "${MODEL:?the folder of a checkpoint, as transformers writes it}"
[ -f "$here/train.jsonl" ] || python "$here/data.py"

# of your model, as in vime's scripts/models: it sets MODEL_ARGS. This is that of Qwen3-VL-4B
MODEL_ARGS_ROTARY_BASE=5000000 source "$VIME_DIR/${MODEL_SCRIPT:-scripts/models/qwen3-4B.sh}"
environment="{\"env_vars\": {\"PYTHONPATH\": \"$here:$MEGATRON_DIR\", \"CUDA_DEVICE_MAX_CONNECTIONS\": \"1\"}}"
options=(
  --custom-megatron-init-path mmpack.adapters.vime.enable # the one flag of mmpack
  --hf-checkpoint "$MODEL"
  --load "$MODEL"
  --megatron-to-hf-mode bridge
  --prompt-data "$here/train.jsonl"
  --input-key input
  --label-key label
  --multimodal-keys '{"image": "images"}'
  --apply-chat-template
  --custom-rm-path reward.score
  --num-rollout 8
  --rollout-batch-size 8
  --n-samples-per-prompt 4
  --rollout-max-response-len 512
  --global-batch-size 32
  --advantage-estimator grpo
  --eps-clip 0.2
  --optimizer adam
  --lr 1e-6
  --lr-decay-style constant
  --use-dynamic-batch-size
  --max-tokens-per-gpu 4096
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --attention-backend flash
  --actor-num-nodes 1
  --actor-num-gpus-per-node 1
  --rollout-num-gpus 1
  --rollout-num-gpus-per-engine 1
)
cd "$VIME_DIR"
exec ray job submit --address="${RAY_ADDRESS:-http://127.0.0.1:8265}" --runtime-env-json="$environment" \
  -- python3 train.py "${MODEL_ARGS[@]}" "${options[@]}" "$@"
