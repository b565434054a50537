"""Does anything that outsize reads break it? Damaged configs, checkpoints, caches, machines and programs, thousands.

The same targets as `tests/fuzz`, with more examples: each input may only lead to an error of outsize's own. No file
outside the target's directory is opened or changed, no code is run, no program started.

    python bench/bench_fuzz.py                    # 1,000 examples for each target, some 4 minutes
"""

import argparse
import contextlib
import io
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.targets import TARGETS

EXAMPLES = 1000


class Counted:
    """A target, and how often it was called."""

    def __init__(self, target: Callable[..., None]) -> None:
        self._target = target
        self.num_calls = 0

    def call(self, values: tuple[object, ...]) -> None:
        self.num_calls += 1
        self._target(*values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="for each target")
    parser.add_argument("--targets", nargs="+", choices=sorted(TARGETS), default=list(TARGETS))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.targets:
        target, strategies = TARGETS[name]
        counted = Counted(target)
        run = settings(
            max_examples=arguments.examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        )(given(st.tuples(*strategies))(counted.call))
        began = time.perf_counter()
        broken = None
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # what is said of damages
                run()
        except BaseException:
            broken = traceback.format_exc()
        results[name] = {"inputs": counted.num_calls, "s": time.perf_counter() - began, "broken": broken}
    rows = [(name, r["inputs"], r["s"], "yes" if r["broken"] else "no") for name, r in results.items()]
    common.print_table(("target", "inputs", "s", "broken"), rows, title="Fuzz")
    for result in results.values():
        if result["broken"]:
            print(result["broken"])
    common.finish(
        {
            "bench": "fuzz",
            "machine": common.machine(),
            "ok": not any(result["broken"] for result in results.values()),
            "inputs": sum(result["inputs"] for result in results.values()),
            "targets": results,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
