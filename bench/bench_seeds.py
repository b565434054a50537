"""Does streamed training equal resident training however late a device is? Over and over, each time late otherwise.

The cases are those of `tests/accelerator/exactness_set.py`, on the made-up accelerator (docs/testing.md). Where one
differs, a wait is missing, or memory is used too early.

    python bench/bench_seeds.py --output bench/results/seeds_2026-11.json   # 200 seeds in both profiles
    python bench/bench_seeds.py --seeds 5 --cases "two devices"
"""

import argparse
import contextlib
import io
import itertools
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: as in the tests
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import common

from accelerator import late

PROFILES = ("late-copies", "late-kernels")


def difference(case: str, profile: str, seed: int) -> str | None:
    """Return what is wrong with a case, once; None where nothing is."""
    from accelerator.exactness_set import differences_of

    try:
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
            return "\n".join(differences_of(case, profile, seed, Path(directory))) or None
    except Exception:
        late.heal()
        return traceback.format_exc()


def main() -> None:
    late.install()
    from accelerator.exactness_set import CASES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200, help="of each profile")
    parser.add_argument("--first", type=int, default=1, help="the first of them")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    began, found = time.perf_counter(), []
    runs = {f"{case}, {profile}": 0 for case in arguments.cases for profile in PROFILES}
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    for seed, profile, case in itertools.product(seeds, PROFILES, arguments.cases):
        wrong = difference(case, profile, seed)
        runs[f"{case}, {profile}"] += 1
        if wrong is not None:
            found.append({"case": case, "profile": profile, "seed": seed, "what": wrong})
            print(f"{case}, {profile}, seed {seed}:\n{wrong}", flush=True)
        elif case == arguments.cases[-1] and profile == PROFILES[-1]:
            print(
                f"seed {seed}: {sum(runs.values())} runs, {len(found)} differences",
                file=sys.stderr,
                flush=True,
            )
    common.print_table(("case", "runs"), runs.items(), title="Seeds")
    common.finish(
        {
            "bench": "seeds",
            "machine": common.machine(),
            "ok": not found,
            "seeds": [seeds.start, seeds.stop - 1],
            "runs": runs,
            "differences": found,
            "s": time.perf_counter() - began,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
