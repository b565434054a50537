"""Cuts of consecutive units as sizes of stages: even ones, packed ones, and the neighbours of one."""

from collections.abc import Callable, Iterator, Sequence

Sizes = tuple[int, ...]


def even_cut(seconds: Sequence[float], num_stages: int) -> Sizes:
    """Return sizes of stages that take as nearly the same time as cuts at its quantiles give; at least a unit each.

    Args:
        seconds: by unit.
        num_stages: at most as many as there are units.
    """
    count = len(seconds)
    total, done, at = sum(seconds), 0.0, 0
    sizes = []
    for stage in range(1, num_stages + 1):
        first, limit = at, total * stage / num_stages
        latest = count - (num_stages - stage)
        while at < latest and (at == first or stage == num_stages or done + seconds[at] / 2 <= limit):
            done += seconds[at]
            at += 1
        sizes.append(at - first)
    return tuple(sizes)


def packed_cut(seconds: Sequence[float], limit_s: float, fits: Callable[[int, int], bool]) -> Sizes:
    """Return sizes of stages that take units as long as they stay under a time and fit.

    Args:
        seconds: by unit, in the order in which they are packed.
        limit_s: most that a stage of several units takes.
        fits: whether units ``[first, end)`` may be a stage; single units are not asked about.
    """
    sizes: list[int] = []
    total = 0.0
    for unit, unit_s in enumerate(seconds):
        total += unit_s
        if sizes and total <= limit_s * (1 + 1e-9) and fits(unit - sizes[-1], unit + 1):
            sizes[-1] += 1
        else:
            sizes.append(1)
            total = unit_s
    return tuple(sizes)


def limits(seconds: Sequence[float], count: int) -> list[float]:
    """Return times to pack under: sums of up to a dozen consecutive units, at most ``count`` of them, evenly drawn."""
    sums = set()
    for first in range(len(seconds)):
        total = 0.0
        for value in seconds[first : first + 12]:
            total += value
            sums.add(round(total, 12))
    found = sorted(sums) or [0.0]
    if len(found) <= count:
        return found
    return [found[i * (len(found) - 1) // (count - 1)] for i in range(count)]


def drawn(least: int, most: int, count: int) -> list[int]:
    """Return at most ``count`` numbers from ``least`` to ``most``, each about as many times the one before."""
    if most - least < count:
        return list(range(least, most + 1))
    ratio = (most / max(least, 1)) ** (1 / (count - 1))
    return sorted({least, most, *(round(max(least, 1) * ratio**i) for i in range(count))})


def neighbours(sizes: Sizes) -> Iterator[Sizes]:
    """Yield sizes with one unit moved to the stage beside, one stage split or two joined, then a unit moved further."""
    for i, size in enumerate(sizes):
        for j in (i - 1, i + 1):
            if size > 1 and 0 <= j < len(sizes):
                yield _moved(sizes, i, j)
        for part in range(1, size):
            yield (*sizes[:i], part, size - part, *sizes[i + 1 :])
        if i + 1 < len(sizes):
            yield (*sizes[:i], size + sizes[i + 1], *sizes[i + 2 :])
    for i, size in enumerate(sizes):
        for j in range(len(sizes)) if size > 1 else ():
            if abs(i - j) > 1:
                yield _moved(sizes, i, j)


def without_first_unit(sizes: Sizes) -> Sizes:
    """Return ``sizes`` with one unit less in the first stage, which is gone where it had no other."""
    return (sizes[0] - 1, *sizes[1:]) if sizes[0] > 1 else sizes[1:]


def _moved(sizes: Sizes, source: int, target: int) -> Sizes:
    changed = list(sizes)
    changed[source] -= 1
    changed[target] += 1
    return tuple(changed)
