"""Do memory and time per token stay what they are, however many tokens a step has?

Each size of a step is trained in a process of its own, from the same model with the same budgets, with rounds of equal
size: a step of more tokens has more rounds. Memory is the peak of resident memory, the device's and the host's, which
a run keeps to its budgets where a processor is the device; what the plan sets aside on both is told beside it. Small
steps warm up as many tokens as large ones have, since a heap grows until it has all its holes. A step of one round has
no sums to bring up; what a token takes is compared with the best smaller step: by the clock, and in seconds of a
processor, which other processes change little. All sizes are timed over as many tokens as the largest step has: the
fastest of many small steps would be luck, which a large step, a mean of many rounds, has no part in. Processors drift
by some percent within minutes, so smaller steps are timed before and after the largest, half their tokens each time.

    python bench/bench_rounds.py                          # 34M, from 4,096 to 262,144 tokens
    python bench/bench_rounds.py --model llama-10m --tokens 1024 4096 --round 1024
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
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


def num_steps(arguments: argparse.Namespace, tokens: int) -> tuple[int, int]:
    """Return how many steps of so many tokens warm up, and how many are timed, in each of its processes."""
    largest = max(arguments.tokens)
    timed = largest if tokens == largest else largest // 2
    return max(1, -(-arguments.warm // tokens)), -(-timed // tokens)


def settings(arguments: argparse.Namespace, directory: Path, run_dir: Path, tokens: int) -> list[str]:
    """Return what a run is told, as ``key=value``."""
    in_a_microbatch = ROWS * SEQ_LEN
    return [
        f"model.path={directory / 'model'}",
        "model.dtype=fp32",
        f"data.path={directory / 'tokens.npy'}",
        "data.format=tokens",
        f"data.seq_len={SEQ_LEN}",
        f"train.steps={sum(num_steps(arguments, tokens))}",
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
    from outsize.training.metrics.run_records import StepRecord
    from outsize.training.run import train

    steps: list[StepRecord] = []
    run_dir = Path(tempfile.mkdtemp(dir=directory))
    config = load_config(None, settings(arguments, directory, run_dir, tokens))
    peaks: list[int] = []
    used: list[common.Usage] = []
    warm, timed = num_steps(arguments, tokens)

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
        "host_bytes": max(peaks[1:]),
        "planned_host_bytes": sum(plan["memory_bytes"]["host"].values()),
        "planned_device_bytes": sum(plan["memory_bytes"]["device"].values()),
        "token_s": sum(step.seconds for step in steps[warm:]) / (timed * tokens),
        "token_cpu_s": (used[-1] - used[warm - 1]).cpu_s / (timed * tokens),
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
    parser.add_argument("--warm", type=int, default=65536, help="tokens before steps count, at least")
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
        found = {tokens: [common.run_child(str(tokens), Path(place))] for tokens in arguments.tokens}
        for tokens in reversed(arguments.tokens[:-1]):
            found[tokens].append(common.run_child(str(tokens), Path(place)))
    report(arguments, model, [both(*runs) for runs in found.values()])


def both(first: dict[str, Any], *after: dict[str, Any]) -> dict[str, Any]:
    """Return what the runs of one size found together: their largest memory, and their mean time."""
    runs = (first, *after)
    memory = {"host_bytes": max(run["host_bytes"] for run in runs)}
    return {**first, **memory, **{name: fmean(run[name] for run in runs) for name in CLOCKS}}


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
