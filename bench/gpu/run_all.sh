#!/usr/bin/env bash
# All that needs a GPU, in less than 28 minutes on one: the equality tests, `outsize verify`, one step of an
# 8B-shaped model beside what `outsize plan` says of it, and a full probe beside the vendor's figures. What has not begun
# by then fails, and so does what is under way. Needs no network and no installation: PYTHON names the
# interpreter, results go to bench/results. C kernels are built where there are setuptools and a compiler.
#
#   bench/gpu/run_all.sh                 # everything; goes on after a part that fails, and fails at the end
#   bench/gpu/run_all.sh tests verify    # or some of: tests step probe verify families accelerator
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# Memory that one stream has freed can serve another; the older name is for torch below 2.9.
export PYTORCH_ALLOC_CONF=expandable_segments:True PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
PYTHON="${PYTHON:-python3}"
RESULTS="${RESULTS:-bench/results}"
mkdir -p "$RESULTS"
"$PYTHON" bench/gpu/check_packages.py || exit 1
"$PYTHON" setup.py -q build_ext --inplace || echo "no C kernels: torch does their work"
failed=()
ALL_S="${ALL_S:-1680}"

part() { # part NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS left=$((ALL_S - SECONDS))
    shift 2
    echo "== $name"
    if ((left < limit)); then limit=$left; fi
    if ((limit <= 0)); then echo "== $name: FAILED, no time is left"; failed+=("$name"); return; fi
    if timeout --kill-after=20 "$limit" "$@"; then echo "== $name: done in $((SECONDS - began)) s"
    else echo "== $name: FAILED with status $? after $((SECONDS - began)) s"; failed+=("$name"); fi
}

run_tests() {
    part tests 480 "$PYTHON" -m pytest -q -m "cuda and not slow" -p no:cacheprovider tests/gpu tests/accelerator \
        tests/runtime/test_device.py
}

run_families() {
    part families 300 "$PYTHON" -m pytest -q -m "cuda and slow" -p no:cacheprovider tests/gpu tests/accelerator
}

# The same tests on a device that is made up, whose streams are late: what the GPU is too quick to show.
run_accelerator() {
    part accelerator 300 "$PYTHON" -m pytest -q -m "not slow" -p no:cacheprovider --accelerator=late tests/accelerator
}

run_verify() {
    local work
    work=$(mktemp -d)
    part model 120 "$PYTHON" bench/shapes.py llama-100m "$work"
    for options in "bf16 host" "bf16 disk" "fp32 host" "bf16 host memory.activations=offload-attention" \
        "bf16 host memory.activations=offload" "bf16 host optimizer.masters=split --set optimizer.clip=unit"; do
        read -r dtype home more <<<"$options"
        # shellcheck disable=SC2086 # several words
        part "verify $options" 150 bash -o pipefail -c '"$@" | tee -a "$0"' "$RESULTS/gpu_verify.jsonl" \
            "$PYTHON" -m outsize verify --model "$work/model" --data "$work/tokens.npy" \
            --steps 3 --tokens-per-step 4096 --seq-len 1024 --microbatches 4 --device cuda --device-memory 2GiB \
            --home "$home" --seed 0 --run-dir "$work/run-${options//[^a-z0-9]/-}" \
            --set model.dtype="$dtype" --set data.format=tokens ${more:+--set $more} --json
    done
    rm -rf "$work"
}

run_step() {
    part "8B step" 570 "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS"
}

run_probe() {
    part probe 200 "$PYTHON" -m outsize probe --full --output "$RESULTS/gpu_machine.json"
    part "probe beside the vendor" 60 "$PYTHON" bench/bench_interconnect.py --machine "$RESULTS/gpu_machine.json" \
        --output "$RESULTS/gpu_interconnect.json"
    part "ways of feeding" 120 "$PYTHON" bench/bench_feed.py --output "$RESULTS/gpu_feed.json"
}

for name in "${@:-tests step probe verify families accelerator}"; do for each in $name; do "run_$each"; done; done
if ((${#failed[@]})); then echo "failed: ${failed[*]}"; exit 1; fi
echo "all done in $SECONDS s"
