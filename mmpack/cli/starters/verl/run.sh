#!/bin/sh
# Make the rows, then train. Options after it go to verl: bash run.sh trainer.n_gpus_per_node=8
set -eu
MMPACK_STARTER=$(cd "$(dirname "$0")" && pwd)
export MMPACK_STARTER
[ -f "$MMPACK_STARTER/train.parquet" ] || python "$MMPACK_STARTER/data.py"
exec python -m verl.trainer.main_ppo --config-path "$MMPACK_STARTER" --config-name grpo "$@"
