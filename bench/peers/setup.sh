#!/usr/bin/env bash
# Create one virtual environment per peer. usage: bench/peers/setup.sh [resident] [fsdp2] [deepspeed]
#
# They lie in build/peers/venvs, or under $PEERS_DIR/venvs. $PYTHON chooses the interpreter. Versions of what the
# peers share with this project come from constraints.txt, so that all of them run the same kernels.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
venvs=${PEERS_DIR:-$root/build/peers}/venvs
export PIP_DISABLE_PIP_VERSION_CHECK=1

environment() { # name package...
  local name=$1 pip="$venvs/$1/bin/python -m pip install --quiet"
  shift
  "${PYTHON:-python3}" -m venv "$venvs/$name" || return
  # torch first and alone, so that the build that the package index offers for this machine stays.
  $pip "$(grep '^torch==' "$root/constraints.txt")" || return
  $pip -c "$root/constraints.txt" transformers numpy psutil "$@"
}

deepspeed() {
  if [[ ! -e /usr/include/libaio.h ]]; then
    echo "libaio.h is missing; installing libaio-dev" >&2
    apt-get update -qq && apt-get install -y -qq libaio-dev >/dev/null || return
  fi
  command -v g++ >/dev/null || { echo "g++ is missing: DeepSpeed compiles its operators" >&2; return 1; }
  environment deepspeed accelerate ninja deepspeed==0.19.8 || return
  # Compile now: at first use it would count as training time, and a killed build leaves a lock that hangs later runs.
  DS_ACCELERATOR=cpu TORCH_EXTENSIONS_DIR="$venvs/deepspeed/extensions" PATH="$venvs/deepspeed/bin:$PATH" \
    "$venvs/deepspeed/bin/python" - <<'PYTHON'
from deepspeed.ops.op_builder import AsyncIOBuilder
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

for builder in (AsyncIOBuilder, CPUAdamBuilder, ShareMemCommBuilder):
    builder().load(verbose=False)
PYTHON
}

failed=()
for peer in "${@:-resident fsdp2 deepspeed}"; do
  for name in $peer; do
    case $name in
      resident | fsdp2) environment "$name" ;;
      deepspeed) deepspeed ;;
      *) echo "unknown peer: $name" >&2; false ;;
    esac && echo "$name: ready in $venvs/$name" || { failed+=("$name"); echo "$name: could not be installed" >&2; }
  done
done
((${#failed[@]} == 0))
