"""How near does the disk home come to a plain direct-I/O loop?

The plain program is the shortest there is: threads that call ``preadv`` or ``pwritev`` with one fixed request
size. Its best request size and number of threads are searched first, for reads and writes apart. Then it and
the home take turns on the same file: the home moves whole planes of a unit (what loads and gradient writes
do) and tiles of all planes of the optimizer (what a step does).

    python bench/bench_disk.py --dir /path/on/the/disk
"""

import argparse
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import Spread, Usage, finish, machine, print_table

from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.optim.optimizer_spec import ITEM_BYTES, StateLayout
from outsize.storage.disk_file import DEFAULT_REQUEST_BYTES
from outsize.storage.home import DiskHome
from outsize.storage.ledger import Arena
from outsize.storage.prealloc import IOPool

MIB = 2**20
REQUEST_SIZES = [256 * 1024 * 2**power for power in range(6)]
THREADS = [1, 2, 4, 8]

LAYOUT = StateLayout(dtype="fp32")
PLANES = {name: ITEM_BYTES[plane.item] for name, plane in LAYOUT.planes.items()}


@dataclass(frozen=True)
class Timed:
    bytes_per_s: float
    cpu_share: float
    """Processor seconds per second of wall time; 1 is one core."""


def timed(num_bytes: int, work: Callable[[], None]) -> Timed:
    before, started = Usage.now(), time.perf_counter()
    work()
    elapsed = time.perf_counter() - started
    return Timed(num_bytes / elapsed, (Usage.now() - before).cpu_s / elapsed)


# --- the plain program ----------------------------------------------------------------------------


class Plain:
    """Threads that move a whole file, request by request, into one buffer."""

    def __init__(self, path: Path, buffer_bytes: int = 64 * MIB) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.num_bytes = os.fstat(self.descriptor).st_size
        self.buffer = mmap.mmap(-1, buffer_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer.madvise(mmap.MADV_HUGEPAGE)  # as the arena does; doubles the rate of both
        self.buffer.write(os.urandom(MIB) * (buffer_bytes // MIB))

    def move(self, written: bool, request_bytes: int, num_threads: int) -> None:
        call = os.pwritev if written else os.preadv
        memory = memoryview(self.buffer)

        def work(first: int) -> None:
            for offset in range(first, self.num_bytes, num_threads * request_bytes):
                at = offset % len(memory)
                length = min(request_bytes, self.num_bytes - offset)
                call(self.descriptor, [memory[at : at + length]], offset)

        threads = [threading.Thread(target=work, args=(i * request_bytes,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def best(self, written: bool, repeats: int) -> tuple[int, int, list[list[object]]]:
        """Return the request size and thread count with the best median, and the table of all."""
        medians: dict[tuple[int, int], float] = {}
        for request_bytes in REQUEST_SIZES:
            for num_threads in THREADS:
                rates = [
                    timed(self.num_bytes, lambda r=request_bytes, n=num_threads: self.move(written, r, n))
                    for _ in range(repeats)
                ]
                medians[request_bytes, num_threads] = Spread.of(r.bytes_per_s for r in rates).median
        request_bytes, num_threads = max(medians, key=medians.__getitem__)
        rows = [[f"{r // 1024} KiB", *(f"{medians[r, n] / 1e9:.2f}" for n in THREADS)] for r in REQUEST_SIZES]
        return request_bytes, num_threads, rows

    def close(self) -> None:
        os.close(self.descriptor)


# --- the home -------------------------------------------------------------------------------------


def model_of(num_bytes: int, unit_elements: int) -> ModelSpec:
    """Return equal fp32 units whose home is about ``num_bytes``."""
    per_unit = unit_elements * sum(PLANES.values())
    units = [
        pack_unit(index, f"layers.{index}", "block", [(f"w{index}", (unit_elements,), True, True)])
        for index in range(max(1, num_bytes // per_unit))
    ]
    return ModelSpec(units=tuple(units), dtype="fp32")


def whole_planes(
    home: DiskHome, model: ModelSpec, arena: Arena, *, written: bool
) -> tuple[int, Callable[[], None]]:
    """All planes of all units, one call each, through two buffers in turn as loads do."""
    numel = model.units[0].numel
    buffers = [arena.take(numel * 4, "slot").view(torch.float32).fill_(1) for _ in range(2)]
    call = home.write if written else home.read
    planes = list(PLANES)

    def work() -> None:
        for unit in model.units:
            for index, plane in enumerate(planes):
                call(unit.index, plane, 0, buffers[index % 2])

    return numel * 4 * len(planes) * len(model.units), work


def tiles(
    home: DiskHome, model: ModelSpec, arena: Arena, tile: int, *, written: bool
) -> tuple[int, Callable[[], None]]:
    """The planes of a step, tile by tile, through two tile buffers in turn."""
    layout = LAYOUT
    planes = layout.write_planes if written else layout.read_planes
    buffers = [
        {plane: arena.take(tile * 4, "tile").view(torch.float32).fill_(1) for plane in planes}
        for _ in range(2)
    ]
    call = home.write_planes if written else home.read_planes
    numel = model.units[0].numel // tile * tile

    def work() -> None:
        for unit in model.units:
            for index, start in enumerate(range(0, numel, tile)):
                call(unit.index, start, buffers[index % 2])

    return numel * 4 * len(planes) * len(model.units), work


# --- the comparison -------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    model = model_of(arguments.size_mib * MIB, arguments.unit_mib * MIB // 4)
    path = directory / "home"
    with (
        Arena() as arena,
        IOPool(arguments.threads) as pool,
        DiskHome(model, LAYOUT, path, pool, request_bytes=arguments.request_kib * 1024) as home,
    ):
        plain = Plain(path)
        try:
            plain.move(True, 4 * MIB, 2)  # the first write to allocated extents is slower than all others
            results = {
                verb: _one_way(arguments, plain, home, model, arena, written=verb == "write")
                for verb in ("read", "write")
            }
        finally:
            plain.close()
        results["buffered_fallbacks"] = int(home.file.is_refused)
    return results


def _one_way(
    arguments: argparse.Namespace,
    plain: Plain,
    home: DiskHome,
    model: ModelSpec,
    arena: Arena,
    *,
    written: bool,
) -> dict[str, object]:
    verb = "write" if written else "read"
    request_bytes, num_threads, rows = plain.best(written, arguments.sweep_repeats)
    print_table(["request", *(f"{n} thr" for n in THREADS)], rows, f"plain loop, {verb}, GB/s")
    contenders = {
        "plain": (plain.num_bytes, lambda: plain.move(written, request_bytes, num_threads)),
        "home planes": whole_planes(home, model, arena, written=written),
        "home tiles": tiles(home, model, arena, arguments.tile_kib * 256, written=written),
    }
    rounds: dict[str, list[Timed]] = {name: [] for name in contenders}
    for _ in range(arguments.repeats):
        for name, (num_bytes, work) in contenders.items():
            rounds[name].append(timed(num_bytes, work))
    report: dict[str, object] = {"plain_request_bytes": request_bytes, "plain_threads": num_threads}
    table = []
    for name, measured in rounds.items():
        rate = Spread.of(m.bytes_per_s for m in measured)
        ratios = Spread.of(
            m.bytes_per_s / p.bytes_per_s for m, p in zip(measured, rounds["plain"], strict=True)
        )
        cpu = Spread.of(m.cpu_share for m in measured).median
        table.append(
            [name, f"{rate.median / 1e9:.2f}", f"{100 * rate.relative:.0f}%", f"{ratios.median:.3f}", cpu]
        )
        report[name.replace(" ", "_")] = {
            "bytes_per_s": rate.median,
            "low": rate.low,
            "high": rate.high,
            "ratio": ratios.median,
            "cpu_cores": cpu,
        }
    title = f"{verb}: plain with {request_bytes // 1024} KiB requests on {num_threads} threads"
    print_table(["who", "GB/s", "spread", "of plain", "cores"], table, title)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(), help="directory on the disk to measure")
    parser.add_argument("--size-mib", type=int, default=1024, help="size of the temporary file")
    parser.add_argument("--unit-mib", type=int, default=32, help="size of one plane of a unit")
    parser.add_argument("--tile-kib", type=int, default=4096, help="size of one plane of a tile")
    parser.add_argument("--threads", type=int, default=4, help="threads of the home")
    parser.add_argument("--request-kib", type=int, default=DEFAULT_REQUEST_BYTES // 1024)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sweep-repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also keep the result in this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix=".bench_disk_") as directory:
        results = compare(arguments, Path(directory))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("dir", "output")}
    finish({"bench": "disk", "settings": settings, "machine": machine(), **results}, arguments.output)


if __name__ == "__main__":
    main()
