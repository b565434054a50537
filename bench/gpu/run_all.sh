#!/usr/bin/env bash
# All that needs a GPU, in less than 28 minutes on one: the equality tests, `outsize verify`, a step of an 8B-shaped model
# beside what `outsize plan` says of it, and a full probe beside the vendor's figures. What has not begun by then fails,
# and what is under way is interrupted: it tells what it has by then, and all else lies in RESULTS already.
#
#   bench/gpu/run_all.sh                 # everything; goes on after a part that fails, and fails at the end
#   bench/gpu/run_all.sh tests verify    # or some of: decode verify tests step probe families accelerator
#   ALL_S=800 bench/gpu/run_all.sh first # what no GPU has answered yet, in order of what hangs on it
#   DEVICE=emulated:1 bench/gpu/run_all.sh   # that it runs, on a machine without a GPU
#
# PYTHON names the interpreter. Packages that it lacks are installed into a virtual environment beside the checkout,
# torch excepted; with INSTALL=0 nothing is, and no network is needed. C kernels are built where there is a compiler.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
PYTHON="${PYTHON:-python3}" DEVICE="${DEVICE:-cuda}" RESULTS="${RESULTS:-bench/results}" ALL_S="${ALL_S:-1680}"
mkdir -p "$RESULTS"
if [[ ${INSTALL:-1} != 0 ]] && lacks=$("$PYTHON" bench/gpu/check_packages.py --names) && [[ -n $lacks ]]; then
    "$PYTHON" -m venv --system-site-packages .venv-gpu && PYTHON=.venv-gpu/bin/python
    # shellcheck disable=SC2086 # several words
    "$PYTHON" -m pip install -q -c constraints.txt $lacks || "$PYTHON" -m pip install -q $lacks
fi
"$PYTHON" bench/gpu/check_packages.py --device "$DEVICE" || exit 1
"$PYTHON" setup.py -q build_ext --inplace || echo "no C kernels: torch does their work"
[[ $DEVICE == cuda ]] || export OUTSIZE_TEST_DEVICE="$DEVICE" OUTSIZE_TEST_DEVICES=emulated:2
failed=()

part() { # part NAME SECONDS COMMAND...
    local name=$1 limit=$2 began=$SECONDS left=$((ALL_S - SECONDS))
    shift 2
    echo "== $name"
    if ((left < limit)); then limit=$left; fi
    if ((limit <= 0)); then echo "== $name: FAILED, no time is left"; failed+=("$name"); return; fi
    if timeout --signal=INT --kill-after=20 "$limit" "$@"; then echo "== $name: done in $((SECONDS - began)) s"
    else echo "== $name: FAILED with status $? after $((SECONDS - began)) s"; failed+=("$name"); fi
}

# What fails is printed as it fails, and read from the XML file by machines. No test at all (5) is none that fails.
run_pytest() { # run_pytest NAME SECONDS ARGUMENTS...
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" bash -c '"$@" || { status=$?; ((status == 5)) || exit $status; }' run_pytest \
        "$PYTHON" -m pytest -v -p no:cacheprovider --junitxml "$RESULTS/gpu_$name.xml" "$@"
}

run_tests() {
    run_pytest tests 420 -m "cuda and not slow" tests/gpu tests/accelerator tests/runtime/test_device.py
}

run_families() {
    run_pytest families 300 -m "cuda and slow" tests/gpu tests/accelerator
}

# The same tests on a device that is made up, whose streams are late: what the GPU, which is hidden, is too quick to show.
run_accelerator() {
    CUDA_VISIBLE_DEVICES='' HIP_VISIBLE_DEVICES='' OUTSIZE_TEST_DEVICE=late:0 OUTSIZE_TEST_DEVICES=late:0,1 \
        run_pytest accelerator 300 -m "not slow" --accelerator=late tests/accelerator
}

run_verify() {
    local work shape=llama-100m tokens=(--tokens-per-step 4096 --seq-len 1024)
    [[ $DEVICE == cuda ]] || shape=llama-10m tokens=(--tokens-per-step 512 --seq-len 128)
    work=$(mktemp -d)
    part model 120 "$PYTHON" bench/shapes.py "$shape" "$work"
    for options in "bf16 host" "bf16 disk" "fp32 host" "bf16 host memory.activations=offload-attention" \
        "bf16 host memory.activations=offload" "bf16 host optimizer.masters=split --set optimizer.clip=unit"; do
        read -r dtype home more <<<"$options"
        # shellcheck disable=SC2086 # several words
        part "verify $options" 90 bash -o pipefail -c '"$@" | tee -a "$0"' "$RESULTS/gpu_verify.jsonl" \
            "$PYTHON" -m outsize verify --model "$work/model" --data "$work/tokens.npy" \
            --steps 3 "${tokens[@]}" --microbatches 4 --device "$DEVICE" --device-memory 2GiB \
            --home "$home" --seed 0 --run-dir "$work/run-${options//[^a-z0-9]/-}" \
            --set model.dtype="$dtype" --set data.format=tokens ${more:+--set $more} --json
    done
    rm -rf "$work"
}

# Once as users have it, and once with segments that memory of one stream can leave for another; the older name is for
# torch below 2.9.
run_step() {
    local tiny=(--device cuda:0) segments=expandable_segments:True
    [[ $DEVICE == cuda ]] || tiny=(--tiny --device "$DEVICE" --device-memory 64MiB)
    part "8B step" 330 "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS" "${tiny[@]}"
    PYTORCH_ALLOC_CONF=$segments PYTORCH_CUDA_ALLOC_CONF=$segments part "8B step, expandable segments" 270 \
        "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS" --label expandable --steps 3 "${tiny[@]}"
}

# First, since no GPU has run these kernels as they are now, and QLoRA and lossless links go by them.
run_decode() {
    local few=(--device cuda)
    [[ $DEVICE == cuda ]] || few=(--device cpu --numel 1000000)
    run_pytest kernels 90 tests/gpu/test_device_kernels.py
    part decode 60 bash -o pipefail -c '"$@" | tee "$0"' "$RESULTS/gpu_decode.json" \
        "$PYTHON" bench/gpu/bench_decode.py "${few[@]}"
}

# Kernels and their rates, a row of MEASURED.md, how soon an 8B model starts and whether its peak is the planned one, what
# determinism costs, and products in fp8 in compiled blocks.
run_first() {
    local on=(--device cuda:0)
    [[ $DEVICE == cuda ]] || on=(--tiny --device "$DEVICE" --device-memory 64MiB)
    run_decode
    part "bench" 150 "$PYTHON" -m outsize bench --device "$DEVICE" --output "$RESULTS/gpu_bench.json"
    # As many layers as host memory holds; of the result read prepare_s, planned_device_bytes, max_reserved_bytes.
    part "8B start" 150 "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS" --label start --steps 2 "${on[@]}"
    for deterministic in off on; do
        part "deterministic $deterministic" 120 "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS" --steps 3 \
            --label "deterministic_$deterministic" --deterministic "$deterministic" --most-layers 24 "${on[@]}"
    done
    run_pytest fp8 90 tests/gpu/test_cuda.py -k "fp8-rowwise-blocks"
}

run_probe() {
    part probe 200 "$PYTHON" -m outsize probe --full --output "$RESULTS/gpu_machine.json"
    part "probe beside the vendor" 60 "$PYTHON" bench/bench_interconnect.py --machine "$RESULTS/gpu_machine.json" \
        --output "$RESULTS/gpu_interconnect.json"
    part "ways of feeding" 120 "$PYTHON" bench/bench_feed.py --output "$RESULTS/gpu_feed.json"
}

for name in "${@:-decode verify tests step probe families accelerator}"; do
    for each in $name; do "run_$each"; done
done
if ((${#failed[@]})); then echo "failed: ${failed[*]}"; exit 1; fi
echo "all done in $SECONDS s"
