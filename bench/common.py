"""What every benchmark needs: medians, a table for people, one JSON line for machines, and counters.

Only the standard library is imported here, so a runner inside a foreign virtual environment can use it too,
and so importing it does not move the memory baseline that a benchmark is about to take.

A benchmark is one file that asks one question. It warms up, repeats, prints a table with ``print_table`` and
ends with ``finish``, whose last line on standard output is one JSON object.
"""

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

# --- arguments ------------------------------------------------------------------------------------


def steps_above(num_untimed: int) -> Callable[[str], int]:
    """Return what argparse reads a number of steps with, of which the first ``num_untimed`` warm up."""

    def steps(text: str) -> int:
        if int(text) <= num_untimed:
            raise argparse.ArgumentTypeError(
                f"{text} would time nothing: the first {num_untimed} warm up; give at least {num_untimed + 1}"
            )
        return int(text)

    return steps


# --- numbers --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements and how far they lay apart."""

    median: float
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Summarise ``values``.

        Raises:
            ValueError: there are none.
        """
        ordered = sorted(values)
        if not ordered:
            raise ValueError("no measurement to summarise")
        return cls(statistics.median(ordered), ordered[0], ordered[-1], len(ordered))

    @property
    def relative(self) -> float:
        """Half the distance between the extremes as a share of the median, 0 for a single value."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0

    def __str__(self) -> str:
        return f"{self.median:.4g} ±{100 * self.relative:.0f}%"


def ratio(value: float | None, reference: float | None) -> float | None:
    """Return ``value / reference``, or None where either is missing or the reference is zero."""
    return value / reference if value is not None and reference else None


# --- output ---------------------------------------------------------------------------------------


def print_table(headers: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print an aligned table; the first column to the left, the others to the right, None as a dash."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    if title:
        print(f"\n{title}")
    for line in [list(headers), ["-" * width for width in widths], *cells]:
        first, *others = zip(line, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]).rstrip())
    sys.stdout.flush()


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def finish(result: Mapping[str, Any], output: Path | None = None) -> None:
    """Print ``result`` as one JSON object on the last line; keep it indented in ``output`` where given."""
    keep(result, output)
    print(json.dumps(result, sort_keys=True), flush=True)


def keep(result: Mapping[str, Any], output: Path | None) -> None:
    """Keep ``result`` indented in ``output`` where given."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def last_json(text: str) -> dict[str, Any] | None:
    """Return the last line of ``text`` that is a JSON object, or None: how other benchmarks end."""
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def run_child(what: str, directory: Path) -> dict[str, Any]:
    """Run the benchmark under way once more, for ``--child what`` in ``directory``, and return what it ends with.

    Raises:
        CalledProcessError: it failed; what it said is on standard error.
    """
    command = [sys.executable, *sys.argv, "--child", what, "--dir", str(directory)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = last_json(done.stdout)
    assert found is not None
    return found


# --- machine --------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return what a reader needs to judge a number: processor, cores, memory, versions and the month."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _proc_fields("/proc/meminfo").get("MemTotal", 0) * 1024,
        "gpu": _gpu(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in ("outsize", "torch", "transformers", "numpy")},
        "commit": _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]),
        "month": datetime.datetime.now(datetime.UTC).strftime("%Y-%m"),
    }


def version_of(package: str) -> str | None:
    """Return the installed version of ``package`` without importing it, or None where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpu() -> str | None:
    names = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return ", ".join(names.splitlines()) if names else None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# --- counters of this process ---------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What the process had used up to now; subtract two of them to charge a stretch of work."""

    read_bytes: int
    """Bytes that storage delivered (of /proc/self/io): page-cache hits do not count, direct I/O does."""
    write_bytes: int
    """Bytes sent towards storage, counted when the page is dirtied or the direct write is issued."""
    cpu_s: float
    """Processor seconds, user and system, of all threads."""

    @classmethod
    def now(cls) -> Self:
        """Read the counters; the byte counts stay 0 where the system has no /proc/self/io."""
        io = _proc_fields("/proc/self/io")
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(io.get("read_bytes", 0), io.get("write_bytes", 0), used.ru_utime + used.ru_stime)

    def __sub__(self, earlier: "Usage") -> "Usage":
        return Usage(
            self.read_bytes - earlier.read_bytes,
            self.write_bytes - earlier.write_bytes,
            self.cpu_s - earlier.cpu_s,
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rss_bytes(pid: int | str = "self") -> int:
    """Return the resident memory of a process in bytes, 0 where the system does not say."""
    return _proc_fields(f"/proc/{pid}/status").get("VmRSS", 0) * 1024


def peak_rss_bytes() -> int:
    """Return the highest resident memory of this process since it started or since ``reset_peak_rss``."""
    peak = _proc_fields("/proc/self/status").get("VmHWM")
    return peak * 1024 if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_rss() -> bool:
    """Let ``peak_rss_bytes`` start anew from here; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def loopback_bytes() -> int:
    """Return the bytes that the loopback of this machine has carried so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[0])
    raise SystemExit("this machine has no loopback in /proc/net/dev")


def _proc_fields(path: str) -> dict[str, int]:
    """Return the ``name: number`` lines of a /proc file; empty where it cannot be read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in lines if ":" in line)
    fields = ((name, rest.split()) for name, rest in pairs)
    return {name: int(words[0]) for name, words in fields if words and words[0].isdigit()}


# --- control groups -------------------------------------------------------------------------------


@contextlib.contextmanager
def control_group(controller: str, first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[Path]:
    """Move this process into a control group of its own, and back; yield the directory of the group.

    Args:
        controller: name of the controller, such as ``memory``.
        first: what is written to files of the group where the controller is of the first version.
        second: the same of the second version.

    Raises:
        OSError: no such group can be made here.
    """
    version_1 = Path("/sys/fs/cgroup") / controller
    top = version_1 if version_1.is_dir() else version_1.parent
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next(path for _, names, path in lines if not names or controller in names.split(","))
    group = top / f"outsize-bench-{os.getpid()}"
    group.mkdir()
    try:
        for name, value in (first if top is version_1 else second).items():
            (group / name).write_text(value)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield group
    finally:
        (top / own.strip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


# --- processes that are forked --------------------------------------------------------------------


def imported_by(work: Callable[[], object]) -> list[str]:
    """Do ``work`` in a child of its own, and return the modules that it has imported there.

    A child that fails ends this program too; what it said is on standard error.
    """
    reader, writer = os.pipe()
    before = set(sys.modules)
    if not (pid := os.fork()):
        try:
            work()
            os.write(writer, "\n".join(sorted(set(sys.modules) - before)).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # nothing of the parent's is cleaned up from here
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        modules = told.read().split()
    if os.waitpid(pid, 0)[1]:
        raise SystemExit("the child that was to prepare this benchmark failed")
    return modules


def import_all(modules: Iterable[str]) -> None:
    """Import what children that are forked from here would: most of their start."""
    for module in modules:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise SystemExit(f"{threads} threads in the process that forks: children would miss them")


# --- models that are not there --------------------------------------------------------------------


def counted(
    hf_config: Mapping[str, Any], dtype: str = "bf16", *, mlp_parts: int = 1, kernels: str = "none"
) -> Any:
    """Return what `outsize plan` counts of the model that a config describes."""
    from outsize.config import parse_config
    from outsize.session.job import known_models

    settings = {
        "model": {"path": "unused", "dtype": dtype, "kernels": kernels},
        "data": {"path": "unused", "seq_len": 1024},
        "train": {"tokens_per_step": 1024, "mlp_parts": mlp_parts},
    }
    return known_models.counted(hf_config, parse_config(settings))
