#!/usr/bin/env bash
# Train on one machine: a process for each GPU, or a single one where there is none.
#     launch/one_machine.sh data.path=my/images optimizer.lr=3e-4
#     CUDA_VISIBLE_DEVICES=0,1 launch/one_machine.sh        some of the GPUs
#     NPROC=4 launch/one_machine.sh                         another number of processes
# Paths in the arguments start at the folder you stand in.
set -euo pipefail
project="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PATH="$project/.venv/bin:$PATH" # the environment that `make` builds, where there is one

NPROC="${NPROC:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
# torchrun would set 1 and print a warning. More helps only where the CPU computes, say in a training without a GPU.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# SIGUSR1 would end torchrun alone and leave its processes behind, unless it is to pass it on.
# With --max-restarts=3, run.dir=... and resume=auto a process that dies costs the steps since the last checkpoint.
exec torchrun --standalone --nproc-per-node="$NPROC" --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "$project/train.py" "$@"
