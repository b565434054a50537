"""Do memory and time per token stay what they are, however many tokens a step has?

Each size of a step is trained in a process of its own, from the same model with the same budgets, with rounds of equal
size: a step of more tokens has more rounds. Memory is the peak of resident memory, the device's and the host's, which
a run keeps to its budgets where a processor is the device; what the plan sets aside on both is told beside it.

Processors drift by up to a tenth within minutes, and a step of 262,144 tokens takes minutes. So all sizes run at the
same time, on as many cores each, and each warms up, and then is timed, for as many tokens as the largest step has. What
a token takes is compared with the best smaller step: by the clock, and in seconds of a processor.

    python bench/bench_rounds.py                          # 34M, from 4,096 to 262,144 tokens
    python bench/bench_rounds.py --model llama-10m --tokens 1024 4096 --round 1024
"""

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common
import shapes

MIB = 2**20
TOKENS = (4096, 16384, 65536, 262144)
SEQ_LEN = 256
CLOCKS = ("token_s", "token_cpu_s")
# Sequences per microbatch.
ROWS = 4


def num_steps(arguments: argparse.Namespace, tokens: int) -> int:
    """Return how many steps of so many tokens warm up; as many are timed."""
    return -(-max(arguments.tokens) // tokens)


def settings(arguments: argparse.Namespace, directory: Path, run_dir: Path, tokens: int) -> list[str]:
    """Return what a run is told, as ``key=value``."""
    in_a_microbatch = ROWS * SEQ_LEN
    return [
        f"model.path={directory / 'model'}",
        "model.dtype=fp32",
        f"data.path={directory / 'tokens.npy'}",
        "data.format=tokens",
        f"data.seq_len={SEQ_LEN}",
        f"train.steps={2 * num_steps(arguments, tokens)}",
        f"train.tokens_per_step={tokens}",
        f"train.microbatches={tokens // in_a_microbatch}",
        f"train.round_microbatches={max(1, arguments.round // in_a_microbatch)}",
        f"train.run_dir={run_dir}",
        "train.save_minutes=0",
        f"memory.device={arguments.device}",
        f"memory.device_memory={arguments.device_memory}",
        "memory.home=host",
        "optimizer.lr=1e-5",
    ]


def run(arguments: argparse.Namespace, directory: Path, tokens: int) -> dict[str, Any]:
    """Train steps of so many tokens and return bytes and seconds."""
    from outsize.config import load_config
    from outsize.runtime.device.heap import own_process
    from outsize.training.records import StepRecord
    from outsize.training.run import train

    own_process()  # as `outsize train` does
    steps: list[StepRecord] = []
    run_dir = Path(tempfile.mkdtemp(dir=directory))
    config = load_config(None, settings(arguments, directory, run_dir, tokens))
    peaks: list[int] = []
    used: list[common.Usage] = []
    warm = num_steps(arguments, tokens)

    def note(record: StepRecord) -> None:
        steps.append(record)
        peaks.append(common.peak_rss_bytes())
        used.append(common.Usage.now())
        common.reset_peak_rss()

    train(config, announce=lambda _: None, progress=note)
    plan = json.loads((run_dir / "plan.json").read_text())
    return {
        "tokens": tokens,
        "rounds": -(-plan["microbatches"] // plan["round_microbatches"]),
        "host_bytes": max(peaks[warm:]),
        "planned_host_bytes": sum(plan["memory_bytes"]["host"].values()),
        "planned_device_bytes": sum(plan["memory_bytes"]["device"].values()),
        "token_s": sum(step.seconds for step in steps[warm:]) / (warm * tokens),
        "token_cpu_s": (used[-1] - used[warm - 1]).cpu_s / (warm * tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=shapes.SHAPES, default="llama-34m")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(TOKENS), help="of a step, the fewest first"
    )
    parser.add_argument("--round", type=int, default=4096, help="tokens of a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child == "model":
        print(json.dumps({"parameters": shapes.write(arguments.model, arguments.dir)}))
        return
    if arguments.child:
        print(json.dumps(run(arguments, arguments.dir, int(arguments.child))))
        return
    with tempfile.TemporaryDirectory(prefix="outsize-rounds-") as place:
        model = common.run_child("model", Path(place))
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // len(arguments.tokens)))
        with ThreadPoolExecutor(len(arguments.tokens)) as beside:
            found = list(
                beside.map(lambda tokens: common.run_child(str(tokens), Path(place)), arguments.tokens)
            )
    report(arguments, model, found)


def report(arguments: argparse.Namespace, model: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Print the table and end with the JSON line."""
    sizes = ("host_bytes", "planned_host_bytes", "planned_device_bytes")
    growth = {name: max(each[name] for each in found) / found[0][name] for name in sizes}
    best = {name: min((each[name] for each in found[:-1]), default=found[-1][name]) for name in CLOCKS}
    common.print_table(
        [
            "tokens per step",
            "rounds",
            "host peak MiB",
            "plan: host",
            "device",
            "µs per token",
            "of a processor",
        ],
        [
            [
                each["tokens"],
                each["rounds"],
                *(f"{each[name] / MIB:.1f}" for name in sizes),
                *(f"{1e6 * each[name]:.1f}" for name in CLOCKS),
            ]
            for each in found
        ],
    )
    ratios = {name: found[-1][name] / best[name] for name in CLOCKS}
    times = " and ".join(f"{ratio:.3f}" for ratio in ratios.values())
    print(f"host peak {growth['host_bytes']:.3f}, per token {times} (≤ 1.02 each)")
    result = {"bench": "rounds", "model": arguments.model, **model, "cases": found}
    result |= {"memory_growth": growth, "time_ratio": ratios, "machine": common.machine()}
    common.finish(result, arguments.output)


if __name__ == "__main__":
    main()
