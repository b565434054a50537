"""The ledger: who holds how many bytes of which tier, and the promise that no tier exceeds its budget."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from outsize.errors import BudgetExceededError
from outsize.units import format_bytes


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        self._lock = threading.Lock()

    def reserve(self, tier: str, what: str, num_bytes: int) -> Reservation:
        """Take ``num_bytes`` of ``tier`` for ``what``.

        Raises:
            BudgetExceededError: the tier would hold more than its budget; the message lists what it holds.
            ValueError: unknown tier, or a negative number of bytes.
        """
        if num_bytes < 0:
            raise ValueError(f"cannot reserve {num_bytes} bytes for {what}")
        with self._lock:
            used = self._used[self._known(tier)] + num_bytes
            budget = self._budgets[tier]
            if budget is not None and used > budget:
                raise BudgetExceededError(self._refusal(tier, what, num_bytes, budget))
            reservation = Reservation(self, tier, what, num_bytes)
            self._held[tier].add(reservation)
            self._used[tier] = used
            self._high_water[tier] = max(self._high_water[tier], used)
        return reservation

    def used(self, tier: str) -> int:
        """Return the bytes that ``tier`` holds now."""
        return self._used[self._known(tier)]

    def high_water(self, tier: str) -> int:
        """Return the most bytes that ``tier`` ever held at once."""
        return self._high_water[self._known(tier)]

    def statistics(self) -> dict[str, TierStatistics]:
        """Return a record per tier, all of the same moment."""
        with self._lock:
            return {
                tier: TierStatistics(
                    budget_bytes=budget,
                    used_bytes=self._used[tier],
                    high_water_bytes=self._high_water[tier],
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
        for reservation in self._held[tier]:
            by_name[reservation.what] = by_name.get(reservation.what, 0) + reservation.num_bytes
        rows = sorted(by_name.items(), key=lambda row: (-row[1], row[0]))
        width = max((len(name) for name in by_name), default=0)
        table = "".join(f"\n  {name:<{width}}  {format_bytes(size):>12}" for name, size in rows)
        return (
            f"{what} asks for {format_bytes(num_bytes)} of tier {tier!r}, which holds"
            f" {format_bytes(self._used[tier])} of {format_bytes(budget)}:{table or ' nothing'}"
        )
