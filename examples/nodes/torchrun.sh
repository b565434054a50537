#!/usr/bin/env bash
# Two machines with torchrun, without a scheduler: run this on both.
#
#   HEAD=node0 ./torchrun.sh train.yaml
#
# HEAD is one of them, by the name or address at which the other reaches it.
set -euo pipefail

config=${1:?usage: HEAD=host $0 CONFIG}
: "${HEAD:?set HEAD to the machine at which all meet}"

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
# Of several networks gloo takes the one that the machine's name belongs to; name another one here.
# export GLOO_SOCKET_IFNAME=eth1

exec torchrun \
    --nnodes "${NODES:-2}" \
    --nproc-per-node "$((gpus > 0 ? gpus : 1))" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:29500" \
    --rdzv-id outsize \
    --max-restarts 3 \
    -m outsize train "$config"
