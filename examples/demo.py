"""Train a 40M-parameter model in a fifth of its training state, from disk, and prove the result exact.

Run it with ``make demo``. It works in ``.demo/`` at the root of the repository and needs no network:

1. makes a Llama-shaped model with fresh weights and a tokenizer (`small_llama.py`);
2. trains it on the source of Python's standard library with ``outsize train examples/demo.yaml``;
3. repeats the first steps streamed and resident with ``outsize verify`` and compares every bit.

Exit status 0 only if both runs are equal. This file starts the commands that you would type and reads what they write;
it imports nothing but the standard library, so the peak memory that a command reports is the command's own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = Path(".demo")
CONFIG = Path("examples/demo.yaml")
VERIFIED_STEPS = 3
BYTES_PER_PARAMETER = 16  # fp32: weight, gradient and AdamW's two moments
MIB = 2**20
# Threads that wait for one another give their core away instead of spinning: lanes share cores, and so do programs.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
# Prints the memory of a process that has imported what a run imports, and done nothing else.
IMPORTS = (
    "import outsize.cli, outsize.training.run, transformers.models.llama.modeling_llama, transformers.optimization; "
    "from transformers import AutoTokenizer; "
    "print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])"
)


def main() -> int:
    """Run the demonstration; returns the exit status."""
    began = time.perf_counter()
    shutil.rmtree(ROOT / WORK, ignore_errors=True)
    title("1. A model and its data")
    print(run("examples/small_llama.py", str(WORK)), end="")
    title("2. Training, streamed from disk")
    trained = outsize("train", str(CONFIG))
    title(f"3. {VERIFIED_STEPS} steps again, streamed and resident")
    verified = outsize("verify", str(CONFIG), *verify_options())
    title("Result")
    report(trained, verified)
    print(f"\nTook {time.perf_counter() - began:.0f} s.")
    return 0 if verified["equal"] else 1


def verify_options() -> list[str]:
    """What differs from the training run: fewer steps, at the full learning rate from the first on."""
    return [
        f"--steps={VERIFIED_STEPS}",
        f"--run-dir={WORK / 'verify'}",
        "--set=optimizer.warmup_steps=0",
        "--set=optimizer.schedule=constant",
    ]


def title(text: str) -> None:
    """Print a heading."""
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def run(*arguments: str) -> str:
    """Run Python on ``arguments`` in the root of the repository; its stderr is shown. Returns its stdout.

    Raises:
        SystemExit: the command failed; it has said why on stderr.
    """
    process = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    # `outsize verify` says with status 1 that the runs differ; then there is a result to show.
    if process.returncode not in (0, 1) or not process.stdout:
        sys.exit(process.returncode or 1)
    return process.stdout


def outsize(*arguments: str) -> dict[str, Any]:
    """Run a command of outsize, and return the JSON object that is the last line of its output."""
    print(f"$ outsize {' '.join(arguments)}", flush=True)
    result: dict[str, Any] = json.loads(run("-m", "outsize", *arguments, "--json").splitlines()[-1])
    return result


def report(trained: dict[str, Any], verified: dict[str, Any]) -> None:
    """Print what was measured."""
    beats = [json.loads(line) for line in (ROOT / trained["run_dir"] / "heartbeat.jsonl").open()]
    plan = json.loads((ROOT / trained["run_dir"] / "plan.json").read_text())
    imports_bytes = int(run("-c", IMPORTS)) * 1024
    parameters = verified["num_weights"]
    state_bytes = parameters * BYTES_PER_PARAMETER
    home_bytes = plan["memory_bytes"]["disk"]["home"]
    seconds = sum(beat["seconds"] for beat in beats)
    print_table(
        ("parameters", f"{parameters / 1e6:.1f}M"),
        (
            "training state",
            f"{state_bytes / MIB:.0f} MiB ({BYTES_PER_PARAMETER} bytes per parameter), on disk in "
            f"{home_bytes / MIB:.0f} MiB with room for the next step beside the last",
        ),
        (
            "device budget",
            f"{trained['budget_bytes'] / MIB:.0f} MiB, 1/{state_bytes / trained['budget_bytes']:.1f} of it",
        ),
        (
            "peak memory (RSS)",
            f"{(trained['peak_rss_bytes'] - imports_bytes) / MIB:.0f} MiB above the "
            f"{imports_bytes / MIB:.0f} MiB of imported libraries",
        ),
        ("steps", f"{len(beats)} of {beats[0]['tokens']} tokens, {seconds:.0f} s"),
        (
            "throughput",
            f"{trained['tokens_per_s']:.0f} tokens/s, waiting for bytes {trained['stall_share']:.1%} of the time",
        ),
        (
            "disk, per step",
            f"{per_step(trained, 'bytes_read')} read, {per_step(trained, 'bytes_written')} written",
        ),
        ("loss", " ".join(f"{beat['loss']:.2f}" for beat in beats[:: max(1, len(beats) // 8)])),
    )
    print("\nStreamed and resident training, from the same weights on the same tokens:\n")
    print(f"{'step':>10}  {'loss, streamed':>20}  {'loss, resident':>20}")
    for step, pair in enumerate(
        zip(verified["loss_streamed"], verified["loss_resident"], strict=True), start=1
    ):
        print(f"{step:>10}  {pair[0]!r:>20}  {pair[1]!r:>20}")
    if "digest_streamed" in verified:
        print(
            f"{'weights':>10}  {verified['digest_streamed'][:20]:>20}  {verified['digest_resident'][:20]:>20}"
        )
    print(f"\n{parameters:,} weights compared, largest difference {verified['max_weight_difference']:g}")
    print("equal, bit for bit" if verified["equal"] else "NOT EQUAL")
    print_how_to_use(Path(trained["export_dir"]))


def per_step(trained: dict[str, Any], key: str) -> str:
    """Bytes of the whole run as MiB per step."""
    return f"{trained[key] / trained['steps'] / MIB:.0f} MiB"


def print_table(*rows: tuple[str, str]) -> None:
    """Print names and values in two columns."""
    for name, value in rows:
        print(f"{name:<20}{value}")


def print_how_to_use(model_dir: Path) -> None:
    """Say where the trained model lies and how to load it."""
    print(
        f"\nThe trained model is in {model_dir}, the timeline of a step in {WORK / 'run' / 'timeline.json'}.\n"
    )
    print("    from transformers import AutoModelForCausalLM, AutoTokenizer")
    print(f'    model = AutoModelForCausalLM.from_pretrained("{model_dir}")')
    print(f'    tokenizer = AutoTokenizer.from_pretrained("{model_dir}")')


if __name__ == "__main__":
    sys.exit(main())
