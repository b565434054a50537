"""Ranks as threads of one process, and what every group of ranks promises, see `outsize.group.group`.

`in_ranks` calls a function on as many threads as there are ranks. A class, because most checks go over several sizes::

    class TestMyGroup(GroupContract):
        def run(self, size, work):
            return in_ranks(size, work)
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from contracts.device_contract import raises, same_values
from outsize.errors import LostRankError
from outsize.group.group import CHUNK_BYTES, Group

T = TypeVar("T")
# To wait in vain means that a rank hangs, not that the machine is slow.
_PATIENCE_S = 600.0


def even_ranges(length: int, size: int, granule: int) -> tuple[range, ...]:
    """Cut ``length`` elements into ranges for ``size`` ranks: as even as whole granules allow, in order, none lost."""
    granules = -(-length // granule)
    bounds = [min(granules * rank // size * granule, length) for rank in range(size + 1)]
    return tuple(range(start, stop) for start, stop in itertools.pairwise(bounds))


class ThreadWorld:
    """Mailbox of ranks that are threads of a process.

    Args:
        size: how many ranks there are.
        timeout_s: seconds that a call waits for a rank.
    """

    def __init__(self, size: int, *, timeout_s: float = _PATIENCE_S) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._sent: dict[tuple[int, int, str], deque[Tensor]] = {}
        self._left: dict[int, str] = {}
        self._changed = threading.Condition()

    def rank(self, rank: int) -> "ThreadGroup":
        """Return the group as this rank sees it."""
        return ThreadGroup(self, rank, "")

    def lose(self, rank: int, why: str = "lost on purpose") -> None:
        """Have ``rank`` be gone: whoever waits for it, now or later, is told."""
        with self._changed:
            self._left.setdefault(rank, why)
            self._changed.notify_all()

    def send(self, source: int, target: int, channel: str, tensor: Tensor) -> None:
        """Leave a copy of ``tensor`` for ``target``."""
        with self._changed:
            self._sent.setdefault((source, target, channel), deque()).append(tensor.clone())
            self._changed.notify_all()

    def receive(self, source: int, target: int, channel: str) -> Tensor:
        """Return what ``source`` sent first of what was not received yet."""
        with self._changed:
            waiting = self._sent.setdefault((source, target, channel), deque())
            if not self._changed.wait_for(lambda: waiting or self._left, self._timeout_s):
                raise LostRankError(f"rank {source} did not come for {self._timeout_s:g} s", source)
            if waiting:
                return waiting.popleft()
            rank, why = next(iter(self._left.items()))
            raise LostRankError(f"rank {rank} is lost: {why}", rank)


class ThreadGroup(Group):
    """One rank of a `ThreadWorld`."""

    def __init__(self, world: ThreadWorld, rank: int, channel: str) -> None:
        super().__init__()
        self.rank, self.size = rank, world.size
        self._world = world
        self._channel = channel

    def channel(self, name: str) -> "ThreadGroup":
        """Return the same ranks, with messages of their own."""
        return ThreadGroup(self._world, self.rank, name)

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Send to and receive from each other rank, see `Group.exchange`."""
        for peer, tensor in outgoing.items():
            if tensor.numel():
                self._world.send(self.rank, peer, self._channel, tensor)
        for peer, tensor in incoming.items():
            if tensor.numel():
                tensor.copy_(self._world.receive(peer, self.rank, self._channel).view_as(tensor))

    def close(self, error: BaseException | None = None) -> None:
        """Leave; with an error the others are told."""
        if error is not None:
            self._world.lose(self.rank, f"{type(error).__name__}: {error}")


def in_ranks(
    size: int, work: Callable[[Group], T], *, world: ThreadWorld | None = None
) -> list[T | BaseException]:
    """Call ``work`` on ``size`` threads, each with its group, and return what came of each, by rank."""
    world = world or ThreadWorld(size)
    results: list[T | BaseException] = [AssertionError("never ended")] * size

    def one(rank: int) -> None:
        group = world.rank(rank)
        try:
            results[rank] = work(group)
        except BaseException as error:
            results[rank] = error
            group.close(error)

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_S)
    return results


class GroupContract:
    """Subclass it and say how work is run on ranks."""

    sizes: Sequence[int] = (1, 2, 3)

    def run(self, size: int, work: Callable[[Group], Any]) -> list[Any]:
        """Return what ``work`` returned on each of ``size`` ranks, by rank; raise what it raised."""
        raise NotImplementedError("say how ranks are made")

    def test_ranks_are_numbered(self) -> None:
        """Each has a number of its own."""
        for size in self.sizes:
            assert self.run(size, lambda group: (group.rank, group.size)) == [
                (rank, size) for rank in range(size)
            ]

    def test_sums_have_the_same_bits_on_all_ranks(self) -> None:
        """Added in the order of ranks: fp32 is not associative, so another order would show."""
        for size in self.sizes:
            parts = [noise(257, rank) for rank in range(size)]
            expected = in_order(parts)

            def work(group: Group, parts: list[Tensor] = parts) -> Tensor:
                total = parts[group.rank].clone()
                group.all_reduce(total)
                return total

            assert all(same_values(total, expected) for total in self.run(size, work))

    def test_a_scattered_sum_is_a_range_of_the_whole_one(self) -> None:
        """For even, uneven and empty ranges, longer than a chunk and shorter; other elements stay as they were."""
        numel = CHUNK_BYTES // 4 + 5
        for size in self.sizes:
            parts = [noise(numel, rank) for rank in range(size)]
            total = in_order(parts)
            cuts = [
                even_ranges(numel, size, 64),
                (*[range(0)] * (size - 1), range(numel)),
                (range(7),) * size,
            ]

            def work(
                group: Group, parts: list[Tensor] = parts, total: Tensor = total, cuts: Any = cuts
            ) -> bool:
                good = True
                for ranges in cuts:
                    flat, expected = parts[group.rank].clone(), parts[group.rank].clone()
                    share = slice(ranges[group.rank].start, ranges[group.rank].stop)
                    expected[share] = total[share]
                    good &= same_values(group.reduce_scatter(flat, ranges), total[share])
                    good &= same_values(flat, expected)
                return good

            assert all(self.run(size, work))

    def test_what_is_gathered_is_what_each_rank_has(self) -> None:
        """Of every dtype, and nothing outside the ranges is touched."""
        for size in self.sizes:
            ranges = even_ranges(1003, size, 16)

            def work(group: Group, ranges: tuple[range, ...] = ranges) -> bool:
                good = True
                for dtype in (torch.float32, torch.bfloat16, torch.uint8):
                    expected = (noise(1010, 9) * 100).to(dtype)
                    flat = torch.full((1010,), 77, dtype=dtype)
                    part = ranges[group.rank]
                    flat[part.start : part.stop] = expected[part.start : part.stop]
                    group.all_gather(flat, ranges)
                    good &= same_values(flat[:1003], expected[:1003]) and bool((flat[1003:] == 77).all())
                return good

            assert all(self.run(size, work))

    def test_small_values_come_from_all(self) -> None:
        """Plain data, in the order of ranks, whatever its length; and a barrier in between."""
        for size in self.sizes:

            def work(group: Group) -> list[Any]:
                group.barrier()
                return group.gather_objects({"rank": group.rank, "text": "é" * group.rank * 100})

            expected = [{"rank": rank, "text": "é" * rank * 100} for rank in range(size)]
            assert all(values == expected for values in self.run(size, work))

    def test_channels_do_not_wait_for_each_other(self) -> None:
        """Two threads of each rank, whose calls come in another order on each rank."""

        def work(group: Group) -> list[list[float]]:
            names = ["up", "down"] if group.rank % 2 else ["down", "up"]
            channels = {name: group.channel(name) for name in names}
            sums: dict[str, list[float]] = {name: [] for name in names}

            def calls(name: str) -> None:
                for number in range(20):
                    value = torch.tensor([float(number + (group.rank if name == "up" else 0))])
                    channels[name].all_reduce(value)
                    sums[name].append(float(value))

            threads = [threading.Thread(target=calls, args=(name,)) for name in names]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(_PATIENCE_S)
            return [sums["up"], sums["down"]]

        size = max(self.sizes)
        up = [float(size * number + sum(range(size))) for number in range(20)]
        assert self.run(size, work) == [[up, [float(size * number) for number in range(20)]]] * size

    def test_what_cannot_be_cut_is_refused(self) -> None:
        """Too few ranges, ranges outside, tensors that are not flat: ValueError before anything is sent."""

        def work(group: Group) -> bool:
            flat = torch.zeros(8)
            uncut = [range(8), *[range(8, 8)] * (group.size - 1)]
            return (
                raises(ValueError, lambda: group.all_gather(flat, uncut[:-1]))
                and raises(ValueError, lambda: group.reduce_scatter(flat[:4], uncut))
                and raises(ValueError, lambda: group.all_gather(flat.view(2, 4), uncut))
            )

        for size in self.sizes:
            assert all(self.run(size, work))


def noise(numel: int, seed: int) -> Tensor:
    """Return fp32 numbers of very different sizes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * 10 ** torch.randint(0, 5, (numel,), generator=generator)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum, one after the other."""
    return list(itertools.accumulate(parts, torch.add))[-1].clone()
