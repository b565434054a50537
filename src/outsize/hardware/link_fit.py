"""Fit the time of copies and of sums over a link, and check the variables that NCCL and gloo listen to. No torch.

One line, ``latency + bytes / rate``, serves a bus whose every byte costs the same. Where sizes fall into regimes (one
thread copies what is small and several what is large, a cache holds what is small) one line is off by a fifth in
between, so a fit may be of several pieces, each a line over a range of sizes; neighbours share the size at which they
meet. A further piece has to pay for its three numbers, by the criterion of Schwarz (1978) for errors whose absolute
values are summed. Sizes that judge a fit have no say in it.

Bus bandwidth of a sum over all ranks is nccl-tests' (doc/PERFORMANCE.md there): a ring moves 2 (n - 1) / n of the bytes
over each link, and no other way does with less, so ``bytes / seconds * 2 (n - 1) / n`` can be held against the rate of
a link for any n.
"""

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import combinations, pairwise
from math import exp, log
from pathlib import Path
from typing import NamedTuple

from outsize.hardware.cgroup import Measurement, Record

# A piece through two sizes has nothing to say of its own error.
_LEAST_SIZES = 3
# Of a piece: where it begins, its latency and its rate.
_NUM_PARAMETERS = 3
# Times are not known to more than this; what is left of it is no reason for another piece.
_NOISE = 0.005


class Piece(Record):
    """A range of sizes and its line.

    Attributes:
        num_bytes: the smallest size of the range; below the first piece its line goes on.
        latency_s: where the line meets 0 bytes; below 0 where bytes cost more than those of the piece before.
        bytes_per_s: rate per direction of further bytes.
    """

    num_bytes: int
    latency_s: float
    bytes_per_s: float


class LinkFit(Record):
    """``latency_s + num_bytes / bytes_per_s``, and how far copies lie from it, as shares of their time.

    Attributes:
        latency_s: fixed cost of a copy: of the smallest sizes, where there are several pieces.
        bytes_per_s: rate per direction beyond it: of the largest sizes, where there are several pieces.
        residual_median: over the sizes that the fit has seen.
        residual_max: the worst of them.
        held_out_median: over sizes that it has not seen; None where there are none.
        held_out_max: the worst of them.
        pieces: by size, where one line is not enough; empty where it is.
    """

    latency_s: float
    bytes_per_s: float
    residual_median: float
    residual_max: float
    held_out_median: float | None
    held_out_max: float | None
    pieces: tuple[Piece, ...] = ()

    def copy_s(self, num_bytes: int) -> float:
        """Return the predicted time of a copy in seconds."""
        pieces = [piece for piece in self.pieces if piece.num_bytes <= num_bytes] or self.pieces[:1]
        line = pieces[-1] if pieces else self
        return line.latency_s + num_bytes / line.bytes_per_s


class _Line(NamedTuple):
    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes * self.s_per_byte

    def error(self, num_bytes: int, seconds: float) -> float:
        return abs(self.seconds(num_bytes) - seconds) / seconds


class _Broken(NamedTuple):
    """Lines, and the sizes at which each but the first begins."""

    lines: tuple[_Line, ...]
    knees: tuple[int, ...]

    def error(self, num_bytes: int, seconds: float) -> float:
        return self.lines[sum(knee <= num_bytes for knee in self.knees)].error(num_bytes, seconds)


def fit_link(
    seconds_by_size: Mapping[int, float],
    held_out: Mapping[int, float] | None = None,
    *,
    num_pieces_max: int = 1,
) -> LinkFit:
    """Fit ``latency + num_bytes / rate`` so that the *relative* errors have the least sum of absolute values.

    With absolute errors the largest copy alone would set both, and a copy of 4 KB be off by its whole time. Squares
    would let one disturbed size bend the line. Some best line of this kind runs through two of the points, or through
    one and the origin where a latency would be negative, so all of them are tried.

    Args:
        seconds_by_size: time of a copy by its bytes, at least two sizes.
        held_out: the same for sizes that only judge the fit.
        num_pieces_max: most pieces; one more is taken where the error falls by more than it would by chance.

    Raises:
        ValueError: fewer than two sizes, or times that are not above zero.
    """
    if len(seconds_by_size) < 2 or min(seconds_by_size.values()) <= 0:
        raise ValueError(f"a line needs two sizes and times above zero, not {dict(seconds_by_size)}")
    best = _chosen(seconds_by_size, num_pieces_max)
    used, unseen = (
        [best.error(size, seconds) for size, seconds in times.items()]
        for times in (seconds_by_size, held_out or {})
    )
    starts = (min(seconds_by_size), *best.knees)
    pieces = tuple(
        Piece(num_bytes=start, latency_s=line.latency_s, bytes_per_s=1 / line.s_per_byte)
        for start, line in zip(starts, best.lines, strict=True)
    )
    return LinkFit(
        latency_s=pieces[0].latency_s,
        bytes_per_s=pieces[-1].bytes_per_s,
        residual_median=statistics.median(used),
        residual_max=max(used),
        held_out_median=statistics.median(unseen) if unseen else None,
        held_out_max=max(unseen) if unseen else None,
        pieces=pieces if len(pieces) > 1 else (),
    )


def _chosen(times: Mapping[int, float], num_pieces_max: int) -> _Broken:
    """Return the fit of as many pieces as pay.

    With errors that are distributed as exp(-|e| / scale) the likelihood of n sizes is that of their mean error to the
    power of -n, and Schwarz asks for half the logarithm of n for each number of a model.
    """
    num_sizes = len(times)
    worth = exp(-_NUM_PARAMETERS * log(num_sizes) / (2 * num_sizes))
    best = _best(times, 1)
    error, needed = _mean_error(best, times), worth
    for num_pieces in range(2, num_pieces_max + 1):
        other = _best(times, num_pieces)
        if error < _NOISE or len(other.lines) < num_pieces:
            break
        if _mean_error(other, times) < needed * error:
            best, error, needed = other, _mean_error(other, times), 1.0
        needed *= worth
    return best


def _mean_error(fit: _Broken, times: Mapping[int, float]) -> float:
    return statistics.fmean(fit.error(size, seconds) for size, seconds in times.items())


def _best(times: Mapping[int, float], num_pieces: int) -> _Broken:
    """Return the fit of least error with ``num_pieces``, or with fewer where there are too few sizes for them."""
    sizes = sorted(times)
    cuts = list(_cuts(len(sizes), num_pieces))
    if not cuts:
        return _best(times, num_pieces - 1)
    line_of: dict[tuple[int, int], tuple[float, _Line]] = {}

    def piece(first: int, last: int) -> tuple[float, _Line]:
        if (first, last) not in line_of:
            part = {size: times[size] for size in sizes[first : last + 1]}
            line_of[first, last] = min(
                (sum(line.error(*point) for point in part.items()), line)
                for line in _lines(part)
                if first > 0 or line.latency_s >= 0
            )
        return line_of[first, last]

    best = min(cuts, key=lambda cut: sum(piece(*ends)[0] for ends in pairwise(cut)))
    lines = tuple(piece(*ends)[1] for ends in pairwise(best))
    return _Broken(lines, tuple(sizes[index] for index in best[1:-1]))


def _cuts(num_sizes: int, num_pieces: int) -> Iterator[Sequence[int]]:
    """Yield the indices at which pieces begin and end; neighbours share one, and each of several has sizes enough."""
    for inner in combinations(range(1, num_sizes - 1), num_pieces - 1):
        cut = (0, *inner, num_sizes - 1)
        if num_pieces == 1 or all(last - first + 1 >= _LEAST_SIZES for first, last in pairwise(cut)):
            yield cut


def _lines(times: Mapping[int, float]) -> Iterator[_Line]:
    """Yield every line that may be the best."""
    yield from (_Line(0.0, seconds / size) for size, seconds in times.items())
    for (size, seconds), (larger, later) in combinations(sorted(times.items()), 2):
        s_per_byte = (later - seconds) / (larger - size)
        if s_per_byte > 0:
            yield _Line(seconds - size * s_per_byte, s_per_byte)


class AllReducePoint(Record):
    """Sums of one size.

    Attributes:
        num_bytes: on each rank.
        held_out: whether the fit has not seen it.
        seconds: of one sum, on the slowest rank.
        bus_bytes_per_s: by nccl-tests' definition.
    """

    num_bytes: int
    held_out: bool
    seconds: Measurement
    bus_bytes_per_s: Measurement


class AllReduceRates(Record):
    """Sums over the ranks of one machine.

    Attributes:
        backend: ``gloo``, or that of the devices: ``nccl``, ``xccl``, ``hccl``.
        num_ranks: processes.
        points: from the smallest size to the largest; none where it could not be measured.
        fit: seconds by the bytes that cross each link, `crossing_bytes`; None where there are no points.
        note: how it was measured, or why not.
    """

    backend: str
    num_ranks: int
    points: tuple[AllReducePoint, ...]
    fit: LinkFit | None
    note: str

    def seconds(self, num_bytes: int, num_ranks: int | None = None) -> float:
        """Return the predicted time of a sum of ``num_bytes`` on each rank.

        The fixed cost is that of ``2 (n - 1)`` messages one after the other, so it grows with the ranks.

        Raises:
            ValueError: nothing was measured.
        """
        if self.fit is None:
            raise ValueError(f"no sum over ranks was measured: {self.note}")
        ranks = num_ranks or self.num_ranks
        steps = (ranks - 1) / (self.num_ranks - 1)
        return self.fit.latency_s * steps + crossing_bytes(num_bytes, ranks) / self.fit.bytes_per_s


def crossing_bytes(num_bytes: float, num_ranks: int) -> float:
    """Return the bytes that cross each link, one direction, where each of ``num_ranks`` has ``num_bytes``.

    Raises:
        ValueError: fewer than two ranks have nothing to exchange.
    """
    if num_ranks < 2:
        raise ValueError(f"a sum over ranks needs two of them, not {num_ranks}")
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def estimates(
    num_bytes: float, num_ranks: int, bytes_per_s: float, latency_s: float = 0.0
) -> dict[str, float]:
    """Return the seconds of a sum over ranks by the way it is taken, where every rank sends and receives at a rate.

    The model and the ways are those of Thakur, Rabenseifner and Gropp (2005), without the time of adding: ``naive``,
    all to one rank and back, one after the other; ``tree``, up and down a binomial tree, whole messages; ``ring``.

    Raises:
        ValueError: fewer than two ranks have nothing to exchange.
    """
    crossing = crossing_bytes(num_bytes, num_ranks)
    whole_s, depth = latency_s + num_bytes / bytes_per_s, (num_ranks - 1).bit_length()
    return {
        "naive": 2 * (num_ranks - 1) * whole_s,
        "tree": 2 * depth * whole_s,
        "ring": 2 * (num_ranks - 1) * latency_s + crossing / bytes_per_s,
    }


def summarize(
    samples: Mapping[int, tuple[float, ...]], *, backend: str, num_ranks: int, note: str
) -> AllReduceRates:
    """Return the rates that ``samples``, seconds by bytes on each rank, stand for; every other size judges the fit.

    Raises:
        ValueError: fewer than two ranks, or times that are not above zero.
    """
    points = []
    for index, (num_bytes, seconds) in enumerate(sorted(samples.items())):
        crossing = crossing_bytes(num_bytes, num_ranks)
        points.append(
            AllReducePoint(
                num_bytes=num_bytes,
                held_out=index % 2 == 1,
                seconds=Measurement.of(seconds, f"{backend}, {num_ranks} ranks, the slowest of them"),
                bus_bytes_per_s=Measurement.of(
                    (crossing / value for value in seconds), "bytes / seconds * 2 (n - 1) / n, as nccl-tests"
                ),
            )
        )
    times = {
        held_out: {
            int(crossing_bytes(point.num_bytes, num_ranks)): point.seconds.median or 0.0
            for point in points
            if point.held_out is held_out
        }
        for held_out in (False, True)
    }
    fit = fit_link(times[False], times[True]) if len(times[False]) > 1 else None
    return AllReduceRates(backend=backend, num_ranks=num_ranks, points=tuple(points), fit=fit, note=note)


# Names that NCCL reads, from the page "Environment Variables" of its guide, without the prefix. It may lack some, so
# a name is only called misspelt where it is close to one of them.
_NCCL = frozenset(Path(__file__).with_name("nccl_variables.csv").read_text(encoding="utf-8").split()[1:])
# Read by PyTorch, which renamed them; the old names still work and warn (torch 2.2 and later).
_RENAMED = ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING")
# Advice that goes round; PyTorch's time limit is an argument.
_NEVER = ("TIMEOUT",)
# Switching a path off or fixing what NCCL would choose by what it finds: name, values, what it costs.
_COSTLY = (
    ("P2P_DISABLE", ("1",), "no copies between GPUs without the host"),
    ("P2P_LEVEL", ("LOC", "0"), "no copies between GPUs without the host"),
    ("SHM_DISABLE", ("1",), "GPUs of one machine talk by network"),
    ("IB_DISABLE", ("1",), "TCP instead of InfiniBand or RoCE"),
    ("NET", ("Socket",), "TCP instead of InfiniBand or RoCE"),
    ("CHECKS_DISABLE", ("0",), "arguments are checked in every call"),
    ("ALGO", None, "one algorithm for all sizes"),
    ("PROTO", None, "one protocol for all sizes"),
    ("MAX_NCHANNELS", ("1", "2"), "one or two channels carry everything"),
    ("DEBUG", ("TRACE",), "every call is logged"),
)


# What gloo and NCCL take an interface from. NCCL takes beginnings of names, exact ones after "=", others after "^".
_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def overriding_variables(variables: Mapping[str, str]) -> list[str]:
    """Return a line for each variable that switches a path off or fixes a choice of NCCL, with what it costs."""
    return [
        f"NCCL_{name}={variables[f'NCCL_{name}']}: {cost}"
        for name, costly, cost in _COSTLY
        if f"NCCL_{name}" in variables and (costly is None or variables[f"NCCL_{name}"] in costly)
    ]


def misspelt_variables(variables: Collection[str]) -> list[str]:
    """Return a line for each variable that looks like one of NCCL's and is none: it has no effect."""
    texts = []
    for name in (name.removeprefix("NCCL_") for name in variables if name.startswith("NCCL_")):
        if name in _RENAMED:
            texts.append(f"NCCL_{name} is now called TORCH_NCCL_{name}")
        elif name in _NEVER:
            texts.append(f"NCCL_{name} is none of NCCL's")
        elif name not in _NCCL and (near := get_close_matches(name, sorted(_NCCL), n=1, cutoff=0.85)):
            texts.append(f"NCCL_{name} is none of NCCL's; NCCL_{near[0]} is")
    return texts


def wrong_interfaces(variables: Mapping[str, str], interfaces: Collection[str]) -> list[str]:
    """Return a line for each variable that names network interfaces none of which this machine has.

    Args:
        variables: the environment.
        interfaces: names of those that the machine has.
    """
    texts = []
    for variable in _INTERFACES:
        text = variables.get(variable, "")
        named = [name for name in text.removeprefix("=").split(",") if name]
        exact = text.startswith("=") or not variable.startswith("NCCL_")
        if not named or text.startswith("^"):
            continue
        if not any(real == name if exact else real.startswith(name) for name in named for real in interfaces):
            texts.append(f"{variable}={text}, but the interfaces are {', '.join(sorted(interfaces))}")
    return texts
