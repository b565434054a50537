"""Does the all-reduce estimator predict measured sums, and what do the tables of the PCIe lesson really say?

Sums over processes of this machine, started by torchrun: gloo, or NCCL where there are GPUs. The estimator is latency
and bus bandwidth fitted on every other size (`outsize.hardware.link_fit`); the sizes between judge it.
Below that
stand the lesson's own table, its own formula evaluated, and what that gives with the real rates of the links.

    python bench/bench_all_reduce.py --ranks 2 4                     # about a minute on two cores
"""

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from common import finish, machine, print_table

from outsize.hardware.link_fit import AllReduceRates, crossing_bytes
from outsize.probing.several_gpus import measure_all_reduce

# The lesson's table, 8 GPUs, fp16 gradients: parameters in 1e9, milliseconds by the GB/s that it names.
PRINTED_MS = {
    0.1: {16: 26.3, 32: 13.1, 300: 1.4, 450: 0.9},
    1.0: {16: 262.5, 32: 131.3, 300: 14.0, 450: 9.3},
    7.0: {16: 1837.5, 32: 918.8, 300: 98.0, 450: 65.3},
    70.0: {16: 18375.0, 32: 9187.5, 300: 980.0, 450: 653.3},
    175.0: {16: 45937.5, 32: 22968.8, 300: 2450.0, 450: 1633.3},
}
# What these links carry per direction, less what packets take: of 16 and 32 GB/s 80 % (docs of `hardware.topology`).
SOUND_GB_PER_S = {16: 12.6, 32: 25.2, 300: 300.0, 450: 450.0}
RANKS, BYTES_PER_PARAMETER = 8, 2


def claims() -> list[dict[str, Any]]:
    """Return each entry of the printed table beside its own formula and beside sound rates."""
    found = []
    for billions, printed in PRINTED_MS.items():
        num_bytes = int(billions * 1e9) * BYTES_PER_PARAMETER
        for rate, printed_ms in printed.items():
            own_ms = crossing_bytes(num_bytes, RANKS) / (rate * 1e9) * 1e3
            sound_ms = crossing_bytes(num_bytes, RANKS) / (SOUND_GB_PER_S[rate] * 1e9) * 1e3
            found.append(
                {
                    "parameters": billions * 1e9,
                    "named_gb_per_s": rate,
                    "printed_ms": printed_ms,
                    "its_formula_ms": own_ms,
                    "sound_ms": sound_ms,
                }
            )
    return found


def show_claims(found: list[dict[str, Any]]) -> None:
    rows = [
        [
            f"{entry['parameters'] / 1e9:g}B",
            f"{entry['named_gb_per_s']} GB/s",
            f"{entry['printed_ms']:.1f}",
            f"{entry['its_formula_ms']:.1f}",
            f"{entry['printed_ms'] / entry['its_formula_ms']:.2f}",
            f"{entry['sound_ms']:.1f}",
        ]
        for entry in found
    ]
    headers = ["model", "link", "printed ms", "its formula ms", "printed / formula", "at real rates ms"]
    print_table(headers, rows, title="the lesson's table, ring over 8 GPUs, fp16 gradients")
    ring, tree = crossing_bytes(8, RANKS) / 8, 2 * math.log2(RANKS) / RANKS
    print(
        f"\nIts table is not what its formula gives. Its tree formula counts {tree:.2f} times the bytes per link, "
        f"below the {ring:.2f} of a ring, which is the least: a tree sends all of them up and down, 2.00 times.\n"
        "Its 'effective bandwidth' divides the bytes of all ranks by a sum over one eighth of them: n times too high."
    )


def show(rates: AllReduceRates) -> None:
    rows = []
    for point in rates.points:
        measured, told = point.seconds.median or math.nan, rates.seconds(point.num_bytes)
        rows.append(
            [
                f"{point.num_bytes // 1024} KiB",
                f"{measured * 1e3:.3f}",
                f"{told * 1e3:.3f}",
                f"{told / measured - 1:+.0%}",
                "held out" if point.held_out else "",
                f"{(point.bus_bytes_per_s.median or 0.0) / 1e9:.2f}",
            ]
        )
    headers = ["on each rank", "measured ms", "estimator ms", "off", "", "bus GB/s"]
    print_table(headers, rows, title=f"{rates.backend}, {rates.num_ranks} ranks")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--bytes-max", type=int, default=64 * 2**20)
    parser.add_argument(
        "--rounds", type=int, default=3, help="of whole runs; the median of their errors counts"
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    results = []
    for ranks in arguments.ranks:
        backend = "nccl" if ranks <= gpus else "gloo"
        runs = [
            measure_all_reduce(ranks, arguments.bytes_max, backend=backend) for _ in range(arguments.rounds)
        ]
        for run in runs:
            if run.fit is None:
                raise SystemExit(run.note)
        show(runs[-1])
        errors = [run.fit.held_out_median for run in runs if run.fit is not None and run.fit.held_out_median]
        last = runs[-1].points[-1]
        results.append(
            {
                "ranks": ranks,
                "backend": backend,
                "held_out_median_error": statistics.median(errors),
                "latency_s": statistics.median(run.fit.latency_s for run in runs if run.fit is not None),
                "fitted_bus_bytes_per_s": statistics.median(
                    run.fit.bytes_per_s for run in runs if run.fit is not None
                ),
                "largest_bus_bytes_per_s": last.bus_bytes_per_s.median,
            }
        )
        print(
            f"\nestimator on sizes it has not seen: off by {results[-1]['held_out_median_error']:.1%} (median)"
        )
    found = claims()
    show_claims(found)
    finish(
        {"benchmark": "all_reduce", "machine": machine(), "measured": results, "claims": found},
        arguments.output,
    )


if __name__ == "__main__":
    main()
