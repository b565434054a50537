"""What is the smallest machine that trains 8B, 14B, 32B and 70B whole? Predictions of ``outsize plan``, not measured.

For each model, and for state that is exact, of six bytes per parameter and of five: the least host memory in which a
plan with the home there fits, in whole GB; the smallest machine that has so much and 6 GB for everything else; the
smallest card with which that machine does, by sequences of 2,048 tokens; and what steps would reach there, and with a
4090. The table of docs/planning.md. A minute of one core.

    python bench/bench_smallest.py --output bench/results/smallest.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import model_configs
from common import finish, machine, print_table

MODELS = {
    name: model_configs.MODELS[name]
    for name in ("Llama-3.1-8B", "Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-70B")
}
STATES = {
    "exact": "--masters split --clip unit",
    "six bytes": "--optimizer-state int8 --clip unit",
    "five bytes": "--optimizer-state int8 --masters split24 --clip unit",
}
MACHINES_GB = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
REST_GB = 6
CARDS = ("4060", "3060", "4080", "4090", "5090", "a6000", "h100")
COMMON = "4090"
GB = 10**9


def answer(config: Path, state: str, card: str, *memory: str) -> dict[str, Any]:
    """Return what ``outsize plan`` prints as JSON, an error too."""
    asked = [sys.executable, "-m", "outsize", "plan", str(config), "--gpus", card, *state.split(), *memory]
    asked += ["--home", "host", "--no-advice", "--json"]
    done = subprocess.run(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def least_host_gb(config: Path, state: str) -> int:
    """Return the least host memory, in whole GB, in which a plan fits beside the largest of the cards."""
    short = answer(config, state, CARDS[-1], "--host-memory", "1GB")["short_by"]["host"]
    gigabytes = 1 + -(-short // GB)
    while "error" in answer(config, state, CARDS[-1], "--host-memory", f"{gigabytes}GB"):
        gigabytes += 1
    return gigabytes


def row_of(config: Path, name: str) -> dict[str, Any]:
    """Return the smallest machine for a state, and what is predicted of it."""
    state = STATES[name]
    host_gb = least_host_gb(config, state)
    for ram in (ram for ram in MACHINES_GB if ram - REST_GB >= host_gb):
        memory = ("--ram", f"{ram}GB", "--host-memory", f"{ram - REST_GB}GB")
        answers = ((card, answer(config, state, card, *memory)) for card in CARDS)
        card, found = next(((card, found) for card, found in answers if "error" not in found), ("", {}))
        if card:
            common = answer(config, state, COMMON, *memory)
            rates = {
                name: [one["tokens_per_s"], *one["interval"]]
                for name, one in ((card, found), (COMMON, common))
            }
            return {"state": name, "host_gb": host_gb, "ram_gb": ram, "card": card, "tokens_per_s": rates}
    raise SystemExit(f"no machine of {MACHINES_GB[-1]} GB trains {config.stem} with {state}")


def told(rate: list[float]) -> str:
    """Return tokens per second with the interval that they are predicted to lie in."""
    return f"{rate[0]:.0f} ({rate[1]:.0f} to {rate[2]:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="keep the result here")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, shape in MODELS.items():
            config = Path(folder) / f"{model}.json"
            config.write_text(json.dumps(shape))
            for name in STATES:
                rows.append({"model": model, **row_of(config, name)})
                print(rows[-1], file=sys.stderr)
    print_table(
        ("model", "state", "least host memory", "machine", "card", "tokens/s", f"with a {COMMON}"),
        [
            (
                row["model"],
                row["state"],
                f"{row['host_gb']} GB",
                f"{row['ram_gb']} GB",
                row["card"],
                told(row["tokens_per_s"][row["card"]]),
                told(row["tokens_per_s"][COMMON]),
            )
            for row in rows
        ],
    )
    finish(
        {"bench": "smallest", "states": STATES, "rows": rows, "machine": machine(), "measured": False},
        options.output,
    )


if __name__ == "__main__":
    main()
