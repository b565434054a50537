"""How many bytes of host memory does full bf16 training take per parameter? Budgets, ledger and resident memory.

Trains the demo's model with its state in host memory within budgets of 5.5 bytes per parameter (8-bit moments, masters
of 24 bits), of 6.5 (8-bit moments, clipped by unit or not at all; Adafactor, exact, with room for the largest unit) and
of 14.5 (AdamW, exact), and without a budget as a run does by default, each in a fresh process. The peak of resident
memory beyond the imports may be the budgets of host and device, and the slack of a device budget that bench_budget.py
allows: 10 % of it and 48 MiB. By how much less is resident than by default, over the parameters, is told beside what
the plans differ by; what a heap keeps within the device's budget makes a byte or so of difference.

    python bench/bench_six_bytes.py               # three minutes on two cores
    python bench/bench_six_bytes.py --steps 20    # the loss of each over more steps
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
DEVICE_BYTES = 256 * MIB
SLACK, SLACK_BYTES = 0.10, 48 * MIB


@dataclass(frozen=True)
class Case:
    """A way to keep the state; a budget of so many bytes per parameter, 0 for none."""

    name: str
    bytes_per_parameter: float
    settings: tuple[str, ...] = ()


CASES = (
    Case("default", 0.0),
    Case("exact", 14.5, ("optimizer.masters=split", "optimizer.clip=unit")),
    Case("8-bit, by unit", 6.5, ("optimizer.state=int8", "optimizer.clip=unit")),
    Case("8-bit, unclipped", 6.5, ("optimizer.state=int8", "optimizer.clip=none")),
    Case(
        "8-bit, 24-bit masters, by unit",
        5.5,
        ("optimizer.state=int8", "optimizer.masters=split24", "optimizer.clip=unit"),
    ),
    Case(
        "Adafactor, by unit",
        6.5,
        ("optimizer.name=Adafactor", "optimizer.lr=1e-2", "optimizer.masters=split", "optimizer.clip=unit"),
    ),
)


def settings_of(case: Case, directory: Path, run_dir: Path, steps: int, parameters: int) -> list[str]:
    budget = int(case.bytes_per_parameter * parameters) or 2**34
    return [
        f"model.path={directory / 'model'}",
        "model.dtype=bf16",
        f"data.path={directory / 'corpus'}",
        "data.glob='*.py'",
        "data.seq_len=128",
        f"train.steps={steps}",
        "train.tokens_per_step=512",
        "train.microbatches=4",
        "train.head_chunk_tokens=128",
        f"train.run_dir={run_dir}",
        "optimizer.lr=1e-3",
        "optimizer.schedule=constant",
        "memory.device=cpu",
        "memory.home=host",
        f"memory.device_memory={DEVICE_BYTES}",
        f"memory.host_memory={budget}",
        *case.settings,
    ]


# --- one case, in a process of its own ------------------------------------------------------------


def run_case(case: Case, directory: Path, steps: int, parameters: int) -> dict[str, Any]:
    """Train, and return what was promised and what was measured, in bytes."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    from outsize import native
    from outsize.config import load_config
    from outsize.training.run import train

    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(directory / "model"))]
    base = common.rss_bytes()
    losses: list[float] = []
    with tempfile.TemporaryDirectory(dir=directory, prefix="run-") as name:
        run_dir = Path(name) / "run"
        config = load_config(None, settings_of(case, directory, run_dir, steps, parameters))
        common.reset_peak_rss()
        result = train(config, progress=lambda record: losses.append(record.loss))
        planned = json.loads((run_dir / "plan.json").read_text())["memory_bytes"]
    host = sum(planned["host"].values())
    budget = int(case.bytes_per_parameter * parameters)
    allowed = (budget or host) + int((1 + SLACK) * DEVICE_BYTES) + SLACK_BYTES
    measured = max(common.peak_rss_bytes(), result.peak_rss_bytes) - base
    return {
        "case": case.name,
        "budget": budget,
        "planned_host": host,
        "planned_device": sum(planned["device"].values()),
        "host_classes": planned["host"],
        "planned_bytes_per_parameter": host / parameters,
        "allowed": allowed,
        "measured": measured,
        "tokens_per_s": result.tokens_per_s,
        "losses": losses,
        "native": native.available(),
        "ok": measured <= allowed and (not budget or host <= budget),
    }


# --- all cases ------------------------------------------------------------------------------------


def child(arguments: list[str]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)
    found = common.last_json(done.stdout)
    if found is None:
        sys.exit(done.returncode or 1)
    return found


def count(directory: Path) -> int:
    """Parameters of the model, read off its file."""
    from safetensors import safe_open

    with safe_open(directory / "model" / "model.safetensors", "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - not a mapping
    total = 0
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def compared(found: list[dict[str, Any]], parameters: int) -> None:
    """Note by how much less each case has resident than the default, per parameter."""
    first = found[0]
    for one in found[1:]:
        one["less_resident_per_parameter"] = (first["measured"] - one["measured"]) / parameters
        one["less_planned_per_parameter"] = (
            first["planned_host"] + first["planned_device"] - one["planned_host"] - one["planned_device"]
        ) / parameters


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dir", type=Path, help="where the model lies; kept if given")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--parameters", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        case = CASES[arguments.case]
        print(json.dumps(run_case(case, arguments.dir, arguments.steps, arguments.parameters)))
        return
    build = Path("build")
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=build, prefix="bench-six-bytes-") as name:
        directory = arguments.dir or Path(name)
        if not (directory / "model").exists():
            subprocess.run(
                [sys.executable, ROOT / "examples" / "small_llama.py", directory], check=True, stdout=2
            )
        parameters = count(directory)
        found = []
        for index, case in enumerate(CASES):
            call = ["--case", str(index), "--dir", str(directory), "--steps", str(arguments.steps)]
            found.append(child([*call, "--parameters", str(parameters)]))
            print(f"{case.name}: {found[-1]['measured'] / MIB:.0f} MiB", file=sys.stderr, flush=True)
    compared(found, parameters)
    report(found, parameters, arguments.output)


def report(found: list[dict[str, Any]], parameters: int, output: Path | None) -> None:
    rows = [
        (
            one["case"],
            f"{one['budget'] / parameters:.1f}" if one["budget"] else "none",
            f"{one['planned_bytes_per_parameter']:.2f}",
            f"{one['measured'] / MIB:.0f}",
            f"{one['allowed'] / MIB:.0f}",
            f"{one['less_resident_per_parameter']:.2f}" if one["budget"] else "-",
            f"{one['less_planned_per_parameter']:.2f}" if one["budget"] else "-",
            f"{one['losses'][-1]:.4f}",
            f"{one['tokens_per_s']:.0f}",
            "yes" if one["ok"] else "NO",
        )
        for one in found
    ]
    headers = (
        "state",
        "budget B/param",
        "planned",
        "peak MiB",
        "allowed",
        "less B/param",
        "by plan",
        "last loss",
        "tokens/s",
        "ok",
    )
    common.print_table(
        headers, rows, title=f"Host memory of {parameters / 1e6:.1f}M parameters trained in bf16"
    )
    common.finish(
        {
            "bench": "six_bytes",
            "machine": common.machine(),
            "parameters": parameters,
            "ok": all(one["ok"] for one in found),
            "cases": found,
        },
        output,
    )


if __name__ == "__main__":
    main()
