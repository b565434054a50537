"""A model of torch's caching allocator on CUDA: what it reserves for the allocations that a run makes.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` of torch 2.13: a pool for each stream and each of two sizes
of blocks; memory comes from the driver in segments; a free block is split where enough is left, joined with its free
neighbours in its segment, and serves its own stream alone. Where the driver gives no more, segments that are free as a
whole go back to it, a retry, and the request is repeated.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

ALLOCATED, FREED, USED = 0, 1, 2
MIB = 2**20
_ROUND, _SMALL, _SMALL_SEGMENT, _MIDDLE, _MIDDLE_SEGMENT = 512, MIB, 2 * MIB, 10 * MIB, 20 * MIB


class OutOfMemoryError(Exception):
    """No memory within the limit, even with all free segments given back."""


@dataclass(eq=False)
class _Block:
    pool: tuple[int, bool]
    size: int
    address: int
    free: bool = True
    before: "_Block | None" = None
    after: "_Block | None" = None


@dataclass
class CachingAllocator:
    """Segments and blocks of one device.

    Attributes:
        limit: bytes that the driver gives at most; None for any number.
        lag: how many more requests come until the event of another stream, on which a block was used, has passed.
        reserved, peak_reserved: bytes taken from the driver, now and at most.
        retries: how often all free segments went back because there was no more.
    """

    limit: int | None = None
    lag: int = 200
    reserved: int = 0
    peak_reserved: int = 0
    retries: int = 0
    _clock: int = 0
    _next_address: int = 0
    _live: dict[int, _Block] = field(default_factory=dict)
    _used: set[int] = field(default_factory=set)
    _waiting: list[tuple[int, _Block]] = field(default_factory=list)
    _free: defaultdict[tuple[int, bool], list[tuple[int, int, _Block]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def run(self, notes: Iterable[tuple[int, int, int, int]], scale: int = 1) -> None:
        """Follow what the made-up device noted; tensors of over 4 KiB are ``scale`` times as large.

        Raises:
            OutOfMemoryError: the limit does not suffice.
        """
        for what, address, num_bytes, stream in notes:
            if what == ALLOCATED:
                self._allocate(address, num_bytes * scale if num_bytes > 4096 else num_bytes, stream)
            elif what == FREED:
                self._release(address)
            elif address in self._live and self._live[address].pool[0] != stream:
                self._used.add(address)

    def empty_cache(self) -> None:
        """Give the driver all segments that are free as a whole, once every event has passed."""
        self._collect(self._clock + self.lag)
        for pool, blocks in self._free.items():
            whole = [entry for entry in blocks if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            self._free[pool] = [entry for entry in blocks if entry not in whole]

    def _allocate(self, address: int, num_bytes: int, stream: int) -> None:
        self._clock += 1
        self._collect(self._clock)
        size = max(1, -(-num_bytes // _ROUND)) * _ROUND
        pool = stream, size <= _SMALL
        block = self._taken(pool, size) or self._segment(pool, size)
        left = block.size - size
        if left >= (_ROUND if pool[1] else _SMALL + 1):
            rest = _Block(pool, left, block.address + size, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            insort(self._free[pool], (rest.size, rest.address, rest))
        block.free = False
        self._live[address] = block

    def _taken(self, pool: tuple[int, bool], size: int) -> _Block | None:
        """Return the smallest free block that fits, which leaves the list of free ones."""
        blocks = self._free[pool]
        index = next((index for index, entry in enumerate(blocks) if entry[0] >= size), None)
        return None if index is None else blocks.pop(index)[2]

    def _segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if pool[1]:
            total = _SMALL_SEGMENT
        else:
            total = _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        if self.limit is not None and self.reserved + total > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + total > self.limit:
                raise OutOfMemoryError(f"{total / MIB:.0f} MiB beside {self.reserved / MIB:.0f} MiB")
        self.reserved += total
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._next_address += total
        return _Block(pool, total, self._next_address - total)

    def _release(self, address: int) -> None:
        block = self._live.pop(address, None)
        if block is None:
            return
        if address in self._used:
            self._used.discard(address)
            self._waiting.append((self._clock + self.lag, block))
        else:
            self._join(block)

    def _collect(self, now: int) -> None:
        passed = [block for until, block in self._waiting if until <= now]
        self._waiting = [entry for entry in self._waiting if entry[0] > now]
        for block in passed:
            self._join(block)

    def _join(self, block: _Block) -> None:
        block.free = True
        blocks = self._free[block.pool]
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            blocks.remove((other.size, other.address, other))
            block.size += other.size
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
        insort(blocks, (block.size, block.address, block))
