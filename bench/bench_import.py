"""How long until the package is there? `import outsize` and `outsize --help` beyond a bare interpreter.

Each in fresh processes, in turn, medians. Also what they loaded: modules in all, and the heavy libraries among them.

    python bench/bench_import.py
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import common

TARGET_S = 0.3
HEAVY = (
    "torch",
    "transformers",
    "numpy",
    "tokenizers",
    "safetensors",
    "accelerate",
    "pydantic",
    "yaml",
    "rich",
    "typer",
)
PROGRAMS = {
    "nothing": "pass",
    "import outsize": "import outsize",
    "outsize --help": "import sys; sys.argv = ['outsize', '--help']; from outsize.cli import main; main()",
    "import outsize.config": "import outsize.config",
    "import outsize.training.run": "import outsize.training.run",
}
REPORT = """
import atexit, json, sys, threading
@atexit.register
def report():
    modules = sorted({{name.partition(".")[0] for name in sys.modules}})
    print(json.dumps({{"modules": modules, "count": len(sys.modules), "threads": threading.active_count()}}))
{program}
"""


def seconds(program: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def loaded(program: str) -> dict[str, object]:
    """What one run has loaded when it ends."""
    command = [sys.executable, "-c", REPORT.format(program=program)]
    found = common.last_json(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert found is not None
    heavy = [name for name in HEAVY if name in found["modules"]]
    return {"modules": found["count"], "heavy": heavy, "threads": found["threads"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(arguments.repeats + 1):
        for name, program in PROGRAMS.items():
            times[name].append(seconds(program))
    spreads = {
        name: common.Spread.of(values[1:]) for name, values in times.items()
    }  # the first fills the page cache
    bare = spreads["nothing"].median
    results = {
        name: {
            "s": spread.median,
            "low": spread.low,
            "high": spread.high,
            "beyond_s": spread.median - bare,
            **loaded(PROGRAMS[name]),
        }
        for name, spread in spreads.items()
    }
    rows = [
        (name, r["s"], r["beyond_s"], r["modules"], ", ".join(r["heavy"]) or "-", r["threads"])
        for name, r in results.items()
    ]
    headers = ("program", "s", "beyond nothing", "modules", "heavy among them", "threads")
    common.print_table(headers, rows, title="Time to import")
    common.finish(
        {
            "bench": "import",
            "machine": common.machine(),
            "target_s": TARGET_S,
            "ok": all(results[name]["beyond_s"] <= TARGET_S for name in ("import outsize", "outsize --help")),
            "programs": results,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
