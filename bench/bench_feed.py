"""What do two or four buffers gain over paging on demand? VELOCITY's comparison, with the same bytes and the same work.

A device computes on chunk after chunk, for about as long as a chunk takes to come: there buffers matter most, and two
can at best halve the time. On a GPU chunks come from host memory (pageable, pinned, and rings of pinned copies); on a
CPU from a file (a mapping that was dropped from memory, direct reads, and rings of them). Every way runs in each round.

    python bench/bench_feed.py --dir /path/on/the/disk               # about a minute on two cores
"""

import argparse
from pathlib import Path

import torch
from common import Spread, finish, machine, print_table
from feed import measure_feed

from outsize.accelerators import Devices
from outsize.probing.effort import QUICK
from outsize.probing.link import measure_links

CLAIMS = (
    (
        "VELOCITY: the ring saturates the bus 100 % of the time, 'effectively doubling real-world throughput'",
        "no run without the ring was shown; its copies and kernels went one after the other, 2 % busy",
        "four buffers",
        "demand-paged",
    ),
    (
        "PCIe lesson: its double buffer overlaps copies and kernels",
        "copy and kernel share a stream and the buffer is refilled with no event: nothing overlaps",
        "two buffers",
        "waited for",
    ),
    (
        "PCIe lesson: pinned memory is 1.5 to 1.8 times as fast as pageable",
        "one copy at a time of memory that was warm; chunks here are as cold as a streamed unit",
        "waited for",
        "demand-paged",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk-mib", type=int, default=8)
    parser.add_argument("--num-chunks", type=int, default=32)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    chunk_bytes = arguments.chunk_mib * 2**20
    rates: dict[str, list[float]] = {}
    most: list[float] = []
    for _ in range(arguments.rounds):
        feed = measure_feed(
            Devices.parse(device), arguments.dir, chunk_bytes=chunk_bytes, num_chunks=arguments.num_chunks
        )
        most += [chunk_bytes / seconds for seconds in feed.compute_s]
        for way, measured in feed.bytes_per_s.items():
            rates.setdefault(way, []).extend(measured)
    busy = {
        way: Spread.of(rate / top for rate, top in zip(values, most, strict=True))
        for way, values in rates.items()
    }
    gains = {
        way: Spread.of(rate / base for rate, base in zip(values, rates["demand-paged"], strict=True))
        for way, values in rates.items()
    }
    rows = [
        [
            way,
            f"{Spread.of(values).median / 1e9:.2f}",
            f"{Spread.of(values).relative:.0%}",
            f"{gains[way].median:.2f}",
            f"{busy[way].median:.0%}",
        ]
        for way, values in rates.items()
    ]
    print_table(
        ["fed", "GB/s", "spread", "of demand-paged", "compute busy"],
        rows,
        title=f"{device} fed from {feed.source}, {arguments.num_chunks} x {arguments.chunk_mib} MiB",
    )
    claims = []
    for claim, counted, way, base in CLAIMS if device != "cpu" else CLAIMS[:2]:  # a CPU has no pinned copies
        ratio = Spread.of(a / b for a, b in zip(rates[way], rates[base], strict=True))
        print(f"\n{claim}\n  measured: {way} over {base} {ratio}\n  counted: {counted}")
        claims.append({"claim": claim, "counted": counted, "measured": ratio.median})
    links = {
        f"{link.path} {link.direction}": link.fit.bytes_per_s
        for link in measure_links(Devices.parse(device), QUICK)
        if link.fit is not None
    }
    print_table(
        ["link", "GB/s"], [[name, f"{rate / 1e9:.2f}"] for name, rate in links.items()], title="copies alone"
    )
    finish(
        {
            "benchmark": "feed",
            "machine": machine(),
            "device": device,
            "bytes_per_s": {way: Spread.of(values).median for way, values in rates.items()},
            "of_demand_paged": {way: gain.median for way, gain in gains.items()},
            "compute_busy": {way: share.median for way, share in busy.items()},
            "links_bytes_per_s": links,
            "claims": claims,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
