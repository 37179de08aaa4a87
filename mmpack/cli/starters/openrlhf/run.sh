#!/bin/sh
# Make the rows, then train. Options after it go to OpenRLHF and win over these: bash run.sh --vllm.num_engines 2
# What is not here is OpenRLHF's default.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
[ -f "$here/train.jsonl" ] || python "$here/data.py"

# the name is all that differs: stock is `python -m openrlhf.cli.train_ppo_ray`
set -- python -m mmpack.adapters.openrlhf \
  --actor.model_name_or_path "${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}" \
  --data.prompt_dataset "$here/train.jsonl" \
  --data.input_key input \
  --data.label_key label \
  --data.image_key images \
  --data.max_images_per_prompt 4 \
  --data.apply_chat_template \
  --data.max_len 2048 \
  --reward.remote_url "$here/reward.py" \
  --algo.advantage.estimator group_norm \
  --algo.kl.init_coef 0 \
  --rollout.n_samples_per_prompt 4 \
  --rollout.batch_size 8 \
  --rollout.micro_batch_size 8 \
  --rollout.max_new_tokens 512 \
  --train.batch_size 32 \
  --train.micro_batch_size 32 \
  --train.colocate_all \
  --actor.num_gpus_per_node 1 \
  --actor.adam.lr 1e-6 \
  --actor.gradient_checkpointing_enable \
  --vllm.num_engines 1 \
  --vllm.gpu_memory_utilization 0.5 \
  --vllm.enable_sleep \
  --ds.enable_sleep \
  --ds.zero_stage 2 \
  "$@"
exec "$@"
