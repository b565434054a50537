#!/usr/bin/env bash
# All that needs a GPU, in less than 28 minutes on one: the equality tests, `outsize verify`, a step of an 8B-shaped model
# beside what `outsize plan` says of it, and a full probe beside the vendor's figures. Each group of parts has its seconds
# (MOST), which together are less; what has not begun by then fails, and what is under way is interrupted: it tells what
# it has by then, and all else lies in RESULTS already.
#
#   bench/gpu/run_all.sh                 # everything; goes on after a part that fails, and fails at the end
#   bench/gpu/run_all.sh tests verify    # or some of: decode verify tests step probe families accelerator
#   ALL_S=800 bench/gpu/run_all.sh first # what no GPU has answered yet, in order of what hangs on it
#   DEVICE=emulated:1 bench/gpu/run_all.sh   # that it runs, on a machine without a GPU
#
# PATIENCE=4 gives each part four times as long, on a machine that is slow or busy. PYTHON names the interpreter.
# Packages that it lacks are installed into a virtual environment beside the checkout, torch excepted; with INSTALL=0
# nothing is, and no network is needed. C kernels are built where there is a compiler.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
PYTHON="${PYTHON:-python3}" DEVICE="${DEVICE:-cuda}" RESULTS="${RESULTS:-bench/results}"
PATIENCE="${PATIENCE:-1}" && ALL_S="${ALL_S:-$((1680 * PATIENCE))}"
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
# Seconds of each group, which its parts share.
declare -A MOST=([decode]=110 [verify]=320 [tests]=360 [step]=400 [probe]=190 [families]=140 [accelerator]=110 [first]=790)
until=$ALL_S

part() { # part NAME SECONDS COMMAND...
    local name=$1 limit=$(($2 * PATIENCE)) began=$SECONDS left=$(((ALL_S < until ? ALL_S : until) - SECONDS))
    shift 2
    if ((left < limit)); then limit=$left; fi
    echo "== $name: at most $limit s"
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
    run_pytest tests 360 -m "cuda and not slow" tests/gpu tests/accelerator tests/runtime/test_device.py
}

run_families() {
    run_pytest families 140 -m "cuda and slow" tests/gpu tests/accelerator
}

# Whether this torch, for a GPU, which is hidden, and the device that is made up understand each other. All that is asked
# of that device (`--accelerator=late tests/accelerator`, ten minutes on a core) any machine without a GPU answers.
run_accelerator() {
    CUDA_VISIBLE_DEVICES='' HIP_VISIBLE_DEVICES='' OUTSIZE_TEST_DEVICE=late:0 OUTSIZE_TEST_DEVICES=late:0,1 \
        run_pytest accelerator 110 -m "not slow" --accelerator=late tests/accelerator/test_made_up_device.py \
        tests/accelerator/test_streams_and_events.py tests/accelerator/test_waits_of_devices.py \
        tests/accelerator/test_current_device.py
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
    [[ $DEVICE == cuda ]] || tiny=(--tiny --device "$DEVICE" --device-memory 64MiB --seq-len 256 --microbatches 2)
    part "8B step" 240 "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS" "${tiny[@]}"
    PYTORCH_ALLOC_CONF=$segments PYTORCH_CUDA_ALLOC_CONF=$segments part "8B step, expandable segments" 200 \
        "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS" --label expandable --steps 3 "${tiny[@]}"
}

# First, since no GPU has run these kernels as they are now, and QLoRA and lossless links go by them.
run_decode() {
    local few=(--device cuda)
    [[ $DEVICE == cuda ]] || few=(--device cpu --numel 1000000)
    run_pytest kernels 70 tests/gpu/test_device_kernels.py
    part decode 40 bash -o pipefail -c '"$@" | tee "$0"' "$RESULTS/gpu_decode.json" \
        "$PYTHON" bench/gpu/bench_decode.py "${few[@]}"
}

# Kernels and their rates; whether lanes wait for each other (what is decoded beside copies, what comes up into memory
# that has computed), adapters and experts whose products are kept, and keys and values in host memory; a row of
# MEASURED.md; how soon an 8B model starts, whether torch reserves no more than planned, with a block set ahead, and how
# much of it the driver pins; what determinism costs; and products in fp8 in compiled blocks.
run_first() {
    local on=(--device cuda:0) kinds=tests/accelerator/test_equal_to_resident.py::test_each_kind
    [[ $DEVICE == cuda ]] || on=(--tiny --device "$DEVICE" --device-memory 64MiB --seq-len 256 --microbatches 2)
    run_decode
    run_pytest orders 120 tests/gpu/test_codecs.py::test_training_over_an_encoded_link_is_equal \
        "$kinds[adapters, products offloaded]" "$kinds[experts, products kept]" \
        "$kinds[products wait below the device]" tests/gpu/test_generate.py::test_a_cache_that_leaves_no_room_rests_on_the_host
    part "bench" 150 "$PYTHON" -m outsize bench --device "$DEVICE" --output "$RESULTS/gpu_bench.json"
    # As many layers as host memory holds. Of the result read prepare_s, planned_device_bytes, max_reserved_bytes,
    # allocator_retries, pinned_bytes and pageable_fallbacks.
    part "8B start" 130 "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS" --label start --steps 2 "${on[@]}"
    for deterministic in off on; do
        part "deterministic $deterministic" 100 "$PYTHON" bench/gpu/bench_8b_step.py --results "$RESULTS" --steps 3 \
            --label "deterministic_$deterministic" --deterministic "$deterministic" --most-layers 24 "${on[@]}"
    done
    run_pytest fp8 80 tests/gpu/test_cuda.py -k "fp8-rowwise-blocks"
}

run_probe() {
    part probe 200 "$PYTHON" -m outsize probe --full --output "$RESULTS/gpu_machine.json"
    part "probe beside the vendor" 60 "$PYTHON" bench/bench_interconnect.py --machine "$RESULTS/gpu_machine.json" \
        --output "$RESULTS/gpu_interconnect.json"
    part "ways of feeding" 120 "$PYTHON" bench/bench_feed.py --output "$RESULTS/gpu_feed.json"
}

for name in "${@:-decode verify tests step probe families accelerator}"; do
    for each in $name; do
        until=$((SECONDS + MOST[$each] * PATIENCE))
        "run_$each"
    done
done
if ((${#failed[@]})); then echo "failed: ${failed[*]}"; exit 1; fi
echo "all done in $SECONDS s"
