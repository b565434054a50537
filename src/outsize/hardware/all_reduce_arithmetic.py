"""The sum over all ranks: what it moves, how fast that was, and how long one of another size takes. Arithmetic only.

Bus bandwidth is nccl-tests' (doc/PERFORMANCE.md there): a ring moves 2 (n - 1) / n of the bytes over each link, and no
other way does with less, so ``bytes / seconds * 2 (n - 1) / n`` can be held against the rate of a link for any n.
"""

from collections.abc import Mapping

from outsize.hardware.link_fit import LinkFit, fit_link
from outsize.hardware.readings import Measurement, Record


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


def crossing_bytes(num_bytes: int, num_ranks: int) -> float:
    """Return the bytes that cross each link, one direction, where each of ``num_ranks`` has ``num_bytes``.

    Raises:
        ValueError: fewer than two ranks have nothing to exchange.
    """
    if num_ranks < 2:
        raise ValueError(f"a sum over ranks needs two of them, not {num_ranks}")
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


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
