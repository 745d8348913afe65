#!/usr/bin/env bash
# Train on several machines: run the same command on each, within a few minutes of one another.
#     launch/several_machines.sh MACHINES HOST[:PORT] [settings]
#     launch/several_machines.sh 2 node1:29400 data.path=/shared/images run.dir=/shared/runs/first
# HOST is one of the machines, by a name or address that all can reach; PORT is open between them (default 29400).
# Each machine needs the same project, the same packages and the data under the same path; run.dir on a shared disk
# keeps the records of all of them together.
set -euo pipefail
if [ "$#" -lt 2 ]; then
    echo "usage: $0 MACHINES HOST[:PORT] [settings]   (the same on each machine)" >&2
    exit 2
fi
machines="$1"
endpoint="$2"
shift 2
case "$endpoint" in *:*) ;; *) endpoint="$endpoint:29400" ;; esac

project="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PATH="$project/.venv/bin:$PATH" # the environment that `make` builds, where there is one
NPROC="${NPROC:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# A hang at the start is most often NCCL on the wrong network card: name the right one, and see what NCCL does.
#     export NCCL_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO
# SIGUSR1 would end torchrun alone and leave its processes behind, unless it is to pass it on.
exec torchrun \
    --nnodes="$machines" \
    --nproc-per-node="$NPROC" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="$endpoint" \
    --rdzv-id="${RUN_ID:-fasttrain}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    "$project/train.py" "$@" # RUN_ID: one of its own for each run where two share HOST and PORT
