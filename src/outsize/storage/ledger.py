"""Host memory: the ledger of budgets for every tier, and pinned memory of exact size.

PyTorch's own pinned allocator rounds every request up to a power of two, up to twice the bytes asked for.
Here each request is an anonymous private mapping of its own, of whole pages. The kernel gives a page when it
is first written, so memory that is taken and never used costs nothing but its reservation. Direct I/O and DMA
both take such addresses.

Whole 2 MiB stretches of a request are huge pages where the kernel has them. A disk request into small pages
is cut up wherever two of them are not neighbours in physical memory, which halves the rate of direct I/O; so
small buffers that the disk uses are best taken together, with `Arena.take_all`.
"""

import logging
import math
import mmap
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Self

import torch
from torch import Tensor

from outsize.errors import BudgetExceededError, Closing, StorageError
from outsize.units import align_up, format_bytes


def tier_of(worker: int, num_workers: int) -> str:
    """Return the tier of the ledger that a worker's memory is: ``device``, or ``device:w1`` where there are several."""
    return "device" if num_workers == 1 else f"device:w{worker}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatistics:
    """One tier of a ledger.

    Attributes:
        used_bytes: what is held now.
        high_water_bytes: the most that was ever held at once.
        budget_bytes: what may be held at once; None is no limit.
    """

    used_bytes: int
    high_water_bytes: int
    budget_bytes: int | None


class Reservation:
    """Bytes of a tier that belong to somebody until released; a context manager.

    Attributes:
        tier: the tier.
        what: who holds them, in words.
        num_bytes: how many.
    """

    __slots__ = ("_ledger", "num_bytes", "tier", "what")

    def __init__(self, ledger: "Ledger", tier: str, what: str, num_bytes: int) -> None:
        self._ledger = ledger
        self.tier = tier
        self.what = what
        self.num_bytes = num_bytes

    def release(self) -> None:
        """Give the bytes back; a second call does nothing."""
        self._ledger._release(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


class Ledger:
    """Books of all tiers. May be used from any thread.

    The sum of the live reservations of a tier never exceeds its budget: a reservation that would break this
    is refused and changes nothing.

    Args:
        budgets: bytes that each tier may hold; None is no limit. Other tiers do not exist.
    """

    def __init__(self, budgets: Mapping[str, int | None]) -> None:
        for tier, budget in budgets.items():
            if budget is not None and budget < 0:
                raise ValueError(f"budget of tier {tier!r} is negative: {budget}")
        self._budgets = dict(budgets)
        self._held: dict[str, set[Reservation]] = {tier: set() for tier in budgets}
        self._used = dict.fromkeys(budgets, 0)
        self._high_water = dict.fromkeys(budgets, 0)
        self._lock = threading.RLock()  # the collector, which may run at any call, lets arenas go

    def reserve(self, tier: str, what: str, num_bytes: int) -> Reservation:
        """Take ``num_bytes`` of ``tier`` for ``what``.

        Raises:
            BudgetExceededError: the tier would hold more than its budget; the message lists what it holds.
            ValueError: unknown tier, or a negative number of bytes.
        """
        if num_bytes < 0:
            raise ValueError(f"cannot reserve {num_bytes} bytes for {what}")
        reservation = Reservation(self, tier, what, num_bytes)
        with self._lock:
            used = self._used[self._known(tier)] + num_bytes
            budget = self._budgets[tier]
            if budget is not None and used > budget:
                raise BudgetExceededError(self._refusal(tier, what, num_bytes, budget))
            self._used[tier] = used
            self._held[tier].add(reservation)
            self._high_water[tier] = max(self._high_water[tier], used)
        return reservation

    def used(self, tier: str) -> int:
        """Return the bytes that ``tier`` holds now."""
        return self._used[self._known(tier)]

    def left(self, tier: str) -> float:
        """Return the bytes that ``tier`` still has to give; infinity where nothing limits it."""
        budget = self._budgets[self._known(tier)]
        return math.inf if budget is None else budget - self._used[tier]

    def statistics(self) -> dict[str, TierStatistics]:
        """Return a record per tier, all of the same moment."""
        with self._lock:
            return {
                tier: TierStatistics(
                    budget_bytes=budget, used_bytes=self._used[tier], high_water_bytes=self._high_water[tier]
                )
                for tier, budget in self._budgets.items()
            }

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            held = self._held[reservation.tier]
            if reservation in held:
                held.remove(reservation)
                self._used[reservation.tier] -= reservation.num_bytes

    def _known(self, tier: str) -> str:
        if tier not in self._budgets:
            raise ValueError(f"no tier {tier!r} in this ledger; it has {', '.join(sorted(self._budgets))}")
        return tier

    def _refusal(self, tier: str, what: str, num_bytes: int, budget: int) -> str:
        """Draw the table of what is held, largest first, equal names summed."""
        by_name: dict[str, int] = {}
        for reservation in tuple(self._held[tier]):
            by_name[reservation.what] = by_name.get(reservation.what, 0) + reservation.num_bytes
        rows = sorted(by_name.items(), key=lambda row: (-row[1], row[0]))
        width = max((len(name) for name in by_name), default=0)
        table = "".join(f"\n  {name:<{width}}  {format_bytes(size):>12}" for name, size in rows)
        return (
            f"{what} asks for {format_bytes(num_bytes)} of tier {tier!r}, which holds"
            f" {format_bytes(self._used[tier])} of {format_bytes(budget)}; raise {tier.partition(':')[0]}_memory, or "
            f"compute less at once. It holds:{table or ' nothing'}"
        )


PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * 2**20
# A driver that has refused so often is asked no more: each question touches the pages and takes time.
MOST_REFUSALS = 3

_log = logging.getLogger(__name__)


class Pinner(Protocol):
    """What makes host memory fit for DMA."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin the pages of a range.

        Raises:
            OSError: the driver refuses; the range is as it was.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin` of the range that starts at ``address``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaStatistics:
    """What an arena holds.

    Attributes:
        num_bytes: bytes taken, whole pages.
        pinned_bytes: of these, pinned.
        pageable_bytes: that should be pinned and are not.
        num_pageable_fallbacks: requests for them.
    """

    num_bytes: int
    pinned_bytes: int
    pageable_bytes: int
    num_pageable_fallbacks: int


class Arena(Closing):
    """Hands out page-aligned host memory as tensors and takes all of it back at once.

    Where pinning fails (WSL2, containers and some drivers pin part of RAM only) the memory is handed out pageable;
    the first time is logged, all are counted, after a few nobody is asked any more, and it costs speed only.

    Args:
        ledger: where the bytes are reserved; None reserves nothing.
        tier: the tier that they are reserved in.
        pinner: what pins each piece, e.g. `DriverPinner`; None leaves memory pageable.

    Attributes:
        ledger: as given.
    """

    def __init__(
        self, *, ledger: Ledger | None = None, tier: str = "host", pinner: Pinner | None = None
    ) -> None:
        self.ledger = ledger
        self._tier = tier
        self._pinner = pinner
        self._mappings: dict[int, tuple[mmap.mmap, int]] = {}
        self._pinned: dict[int, int] = {}
        self._reservations: dict[int, Reservation] = {}
        self._num_fallbacks = self._pageable_bytes = 0
        self._last_refusal: OSError | None = None
        self._closed = False
        self._lock = threading.Lock()
        weakref.finalize(self, _let_go, pinner, self._pinned, self._reservations).atexit = False

    def take(self, num_bytes: int, what: str, *, pins: bool = True) -> Tensor:
        """Return ``num_bytes`` zero bytes as a uint8 tensor whose address is a multiple of 4096.

        Args:
            num_bytes: size of the tensor; the reservation is rounded up to whole pages.
            what: who needs it, for the ledger's table.
            pins: whether it is pinned at once; else `pin` does, or nobody.

        Raises:
            BudgetExceededError: the tier has too little left.
            StorageError: the kernel gives no address space.
            ValueError: a negative size, or the arena is closed.
        """
        if num_bytes < 0:
            raise ValueError(f"cannot take {num_bytes} bytes for {what}")
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        size = align_up(num_bytes, PAGE_BYTES)
        with self._lock:
            if self._closed:
                raise ValueError(f"{what} asks a closed arena for memory")
            reservation = self.ledger.reserve(self._tier, what, size) if self.ledger else None
            try:
                mapping, offset = _map(size, what)
            except BaseException:
                if reservation:
                    reservation.release()
                raise
            tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=num_bytes, offset=offset)
            address = tensor.data_ptr()
            if reservation:
                self._reservations[address] = reservation
            self._mappings[address] = mapping, size
            if pins and (error := self._refusal(address, size)) is not None and self._num_fallbacks == 1:
                self._warn(f"{what} ({format_bytes(size)}) stays", error)
        return tensor

    def pin(self, tensors: Sequence[Tensor], what: str) -> None:
        """Pin what was taken without, in order, as far as the driver does; one line says how much stays pageable."""
        with self._lock:
            sizes = [align_up(tensor.nbytes, PAGE_BYTES) for tensor in tensors]
            errors = [self._refusal(each.data_ptr(), size) for each, size in zip(tensors, sizes, strict=True)]
            left = sum(size for size, error in zip(sizes, errors, strict=True) if error is not None)
            if left and self._last_refusal is not None:
                self._warn(
                    f"{format_bytes(left)} of {format_bytes(sum(sizes))} of {what} stay", self._last_refusal
                )

    def give_back(self, tensor: Tensor) -> None:
        """Unpin what `take` has returned; what it holds stays for whoever has it still. Nothing may be in flight."""
        address = tensor.data_ptr()
        with self._lock:
            del self._mappings[address]
            pinned, reservation = self._pinned.pop(address, 0), self._reservations.pop(address, None)
        _let_go(
            self._pinner, {address: pinned} if pinned else {}, {address: reservation} if reservation else {}
        )

    def take_all(self, sizes: Sequence[int], what: str) -> list[Tensor]:
        """Return tensors of ``sizes`` bytes, aligned as by `take`, out of one piece; errors as in `take`."""
        starts = [0, *accumulate(align_up(size, PAGE_BYTES) for size in sizes)]
        memory = self.take(starts[-1], what)
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def _refusal(self, address: int, num_bytes: int) -> OSError | None:
        """Pin a range; return why it stays pageable, or None."""
        if self._pinner is None:
            return None
        if self._num_fallbacks < MOST_REFUSALS:
            try:
                self._pinner.pin(address, num_bytes)
            except OSError as error:
                self._last_refusal = error
            else:
                self._pinned[address] = num_bytes
                return None
        self._num_fallbacks += 1
        self._pageable_bytes += num_bytes
        return self._last_refusal

    def _warn(self, what: str, error: OSError) -> None:
        _log.warning("%s pageable, copies to the GPU will be slower: %s", what, error)

    def statistics(self) -> ArenaStatistics:
        """Return what is held now."""
        with self._lock:
            return ArenaStatistics(
                num_bytes=sum(size for _, size in self._mappings.values()),
                pinned_bytes=sum(self._pinned.values()),
                pageable_bytes=self._pageable_bytes,
                num_pageable_fallbacks=self._num_fallbacks,
            )

    def close(self) -> None:
        """Unpin everything and give the pages back to the kernel; a second call does nothing.

        Tensors that are still alive stay valid addresses and read as zeros: each range is unmapped when its
        last tensor goes. Nothing may be in flight to or from the memory.
        """
        with self._lock:
            self._closed = True
            _let_go(self._pinner, self._pinned, self._reservations)
            for mapping, _ in self._mappings.values():
                # Not mapping.close(): torch.frombuffer holds the object but not its buffer, so closing would
                # pull the memory from under live tensors.
                mapping.madvise(mmap.MADV_DONTNEED)
            self._mappings.clear()


def _let_go(pinner: Pinner | None, pinned: dict[int, int], reservations: dict[int, Reservation]) -> None:
    for address in pinned:
        assert pinner is not None
        pinner.unpin(address)
    for reservation in reservations.values():
        reservation.release()
    pinned.clear()
    reservations.clear()


def _map(num_bytes: int, what: str) -> tuple[mmap.mmap, int]:
    """Map private memory that child processes do not inherit; return it and where the piece starts."""
    slack = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0  # address space only, never touched
    try:
        mapping = mmap.mmap(-1, num_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise StorageError(
            f"no host memory for {what} ({format_bytes(num_bytes)}): {error}; lower the host budget"
        ) from error
    # A fork would make every page copy-on-write: the next step would copy the whole home in this process.
    mapping.madvise(mmap.MADV_DONTFORK)
    if not slack:
        return mapping, 0
    address = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    offset = -address % HUGE_PAGE_BYTES
    with suppress(OSError):  # a kernel without huge pages
        # Only whole huge pages of this piece: the last one must not make more memory resident than was taken.
        mapping.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return mapping, offset
