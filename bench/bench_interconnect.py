"""The interconnect tables of the seeds, beside what is true and, with a machine, beside what it measured.

Arithmetic alone unless ``--machine`` names what ``outsize probe -o`` wrote: links by generation and width, NVLink
against PCIe like for like, fixed cost and bandwidth by size, starvation, and the guide's time of a gradient sum.

    python bench/bench_interconnect.py --machine machine.json
"""

import argparse
from pathlib import Path
from typing import Any

from common import finish, machine, print_table

from outsize.hardware.cards import known_card
from outsize.hardware.link_fit import crossing_bytes
from outsize.hardware.machine_file import MachineFile, read
from outsize.hardware.topology import LANE_BYTES_PER_S, SOUND_SHARE, theory_bytes_per_s

GB = 1e9
# What each seed says of a link (GB/s), and what it is per direction.
LINKS = (
    ("VELOCITY: PCIe of the test PC", 64.0, "Gen4 x16, per direction", theory_bytes_per_s(4, 16)),
    (
        "PCIe lesson: PCIe 4.0 x16",
        32.0,
        "the same, named right but for the line code",
        theory_bytes_per_s(4, 16),
    ),
    (
        "PCIe guide: PCIe Gen3 x16 'bidirectional' 16",
        16.0,
        "per direction; both add up to 31.5",
        theory_bytes_per_s(3, 16),
    ),
    ("PCIe lesson: NVLink 4.0", 900.0, "both directions of 18 links; one is half", 450 * GB),
    ("PCIe guide: NVLink 3.0", 600.0, "both directions of 12 links; one is half", 300 * GB),
)
# Ratios that seeds print, and the same quantities like for like.
RATIOS = (
    (
        "PCIe lesson: NVLink 4 is 28 times PCIe 4",
        28.0,
        "900 of both directions by 32 of one",
        450 * GB,
        (4, 16),
    ),
    (
        "the same by PCIe 5, which H100 machines have",
        28.0,
        "450 by 63, each per direction",
        450 * GB,
        (5, 16),
    ),
    (
        "PCIe guide: NVLink 3 is 37 times PCIe 3",
        37.0,
        "600 of both directions by 16 of one",
        300 * GB,
        (3, 16),
    ),
)
SIZES = tuple(4**power for power in range(5, 16))
LESSON_LATENCY_S, LESSON_BYTES_PER_S = 15e-6, 16 * GB


def generations() -> list[list[object]]:
    return [
        [
            f"generation {generation}",
            *(f"{theory_bytes_per_s(generation, lanes) / GB:.1f}" for lanes in (1, 4, 8, 16)),
        ]
        for generation in LANE_BYTES_PER_S
    ]


def claims() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"claim": name, "claimed": claimed, "unit": "GB/s", "true": true / GB, "counted": counted}
        for name, claimed, counted, true in LINKS
    ]
    for name, claimed, counted, nvlink, pcie in RATIOS:
        true = nvlink / theory_bytes_per_s(*pcie)
        found.append({"claim": name, "claimed": claimed, "unit": "times", "true": true, "counted": counted})
    # A device at 3 TB/s that uses each byte once; used k times, it starves less.
    starved = 1 - theory_bytes_per_s(4, 16) / 3000e9
    found.append(
        {
            "claim": "VELOCITY: the GPU waits 98 % of its time",
            "claimed": 98.0,
            "unit": "%",
            "true": 100 * starved,
            "counted": "only if each byte is used once; with k uses of it 1/k of that much has to cross",
        }
    )
    # 125M parameters in fp32, as the guide has it: 10 s and 140 s 'sync per step'.
    formula_s = 125e6 * 4 * 2 / (16 * GB)
    ring_s = crossing_bytes(int(125e6 * 4), 2) / (SOUND_SHARE * theory_bytes_per_s(3, 16))
    found.append(
        {
            "claim": "PCIe guide: 10 s of gradient sums per step at batch 2, 140 s at batch 4",
            "claimed": 10.0,
            "unit": "s",
            "true": ring_s,
            "counted": f"step time less another step time; its own formula gives {formula_s * 1e3:.0f} ms for both",
        }
    )
    return found


def by_size(found: MachineFile | None) -> list[list[object]]:
    """Return effective GB/s by size: the lesson's 15 us + 16 GB/s, and each measured link."""
    rows: list[list[object]] = []
    fits = [
        (f"{device.device} {link.path} {link.direction}", link.fit)
        for device in (found.devices if found is not None else ())
        for link in device.links
        if link.fit is not None and link.direction != "both"
    ]
    for size in SIZES:
        lesson = size / (LESSON_LATENCY_S + size / LESSON_BYTES_PER_S)
        measured = [size / fit.copy_s(size) for _, fit in fits]
        rows.append([f"{size // 1024} KiB", *(f"{rate / GB:.3f}" for rate in (lesson, *measured))])
    print_table(
        ["copy", "lesson", *(name for name, _ in fits)], rows, title="GB/s of one copy, fixed cost included"
    )
    return rows


def by_the_vendor(found: MachineFile) -> list[dict[str, Any]]:
    """Return measured products, memory and links of each GPU that a preset knows, beside the vendor's figures."""
    told: list[dict[str, Any]] = []
    for index, device in enumerate(found.devices):
        card = known_card(device.name)
        preset = None if card is None else card.gpu()
        if preset is None or not device.device.startswith("cuda"):
            continue

        def add(what: str, measured: float | None, vendor: float, on: str = device.device) -> None:
            if measured is not None:
                told.append({"what": f"{on} {what}", "measured": measured, "vendor": vendor})

        for dtype, rate in device.matmul_flops_per_s.items():
            if dtype in preset.peak_flops_per_s:
                add(f"products {dtype}, FLOP/s", rate.median, preset.peak_flops_per_s[dtype].value)
        add("memory, bytes/s", device.memory_triad_bytes_per_s.median, preset.memory_bytes_per_s.value)
        gpu = found.inventory.gpus[index] if index < len(found.inventory.gpus) else None
        lanes = gpu.pcie_lanes.number() if gpu is not None else None
        theory = theory_bytes_per_s(preset.pcie_generation, int(lanes or 16))
        for link in device.links:
            if link.fit is not None and link.direction != "both":
                add(f"link {link.path} {link.direction}, bytes/s", link.fit.bytes_per_s, theory)
    rows = [
        [entry["what"], entry["measured"], entry["vendor"], f"{entry['measured'] / entry['vendor']:.0%}"]
        for entry in told
    ]
    if rows:
        print_table(["measured beside the vendor's figure", "measured", "vendor", ""], rows)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", type=Path, help="what `outsize probe -o` wrote")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found = read(arguments.machine) if arguments.machine else None
    print_table(
        ["PCIe", "x1", "x4", "x8", "x16"],
        generations(),
        title="GB/s per direction, line code taken off, packets not",
    )
    told = claims()
    rows = [
        [entry["claim"], entry["claimed"], entry["true"], entry["unit"], entry["counted"]] for entry in told
    ]
    print_table(["claim", "claimed", "true", "", "what it counted"], rows, title="claims of the seeds")
    by_size(found)
    vendor = by_the_vendor(found) if found is not None else []
    measured = {}
    for device in found.devices if found is not None else ():
        for link in device.links:
            if link.fit is not None:
                measured[f"{device.device} {link.path} {link.direction}"] = {
                    "latency_s": link.fit.latency_s,
                    "bytes_per_s": link.fit.bytes_per_s,
                    "held_out_median": link.fit.held_out_median,
                }
    finish(
        {
            "benchmark": "interconnect",
            "machine": machine(),
            "claims": told,
            "measured": measured,
            "vendor": vendor,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
