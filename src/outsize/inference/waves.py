"""Forwards in flight together: each unit comes up once for all of them.

The story of a pass of generations:

1. Those that wait enter, as far as there is a use for more and room: what each will hold at its longest has a place
   beside the slots before it enters. The first one enters alone, and measures.
2. Units are visited in order. While the weights of one are there, each forward that has called it runs on it, one after
   the other.
3. Behind the last unit a token is chosen, by transformers' own code, and the generation calls the first unit again, for
   the next pass; or it has ended, and leaves.

So a wave is of generations of any length, and each computes what it would alone.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.inference.inference_session import InferenceSession, InferenceStatistics
from outsize.inference.kv_cache import ForwardExtent, Growth, bytes_held, extent_of, find_cache, grown_bytes
from outsize.model.walk import Boundaries, Finished, UnitCall, Walk
from outsize.units import align_up

PAST_BREAK_EVEN = 3.0  # computing of a pass over loading the weights for it
# Tokens to which the length of a generation is rounded up where its keys and values are counted.
LENGTH_STEP = 64


class LoadHiding:
    """How much work at once has computing take longer than loading, by what passes took; work is tokens, or rows."""

    def __init__(self) -> None:
        self.load_s = self.compute_s = 0.0  # of a pass, and for one piece of work
        self._bytes_per_s = 0.0  # at most, over whole passes

    def took(
        self, work: int, seconds: float, before: InferenceStatistics | None, after: InferenceStatistics | None
    ) -> None:
        """Take account of a pass.

        Args:
            work: done in it.
            seconds: it took.
            before: statistics when it began; None where nothing streams.
            after: and when it ended.
        """
        start = (before.bytes_moved, before.stall_s, before.load_s) if before else (0, 0.0, 0.0)
        moved, stalled, loading = (
            (after.bytes_moved - start[0], after.stall_s - start[1], after.load_s - start[2])
            if after
            else (0, 0.0, 0.0)
        )
        self.compute_s = max(seconds - stalled, 0.0) / max(work, 1)
        # Where copies are asynchronous, the thread that loads does not see how long they take.
        self._bytes_per_s = max(self._bytes_per_s, moved / seconds if seconds > 0 else 0.0)
        self.load_s = max(loading, moved / self._bytes_per_s) if moved else 0.0

    @property
    def enough(self) -> int:
        """Work past the break-even; 0 where nothing has to be loaded."""
        return int(PAST_BREAK_EVEN * self.load_s / max(self.compute_s, 1e-12))


@dataclass(slots=True)
class _Flight:
    """A forward, or many of a generation, on its way.

    Attributes:
        walk: paused at a unit.
        call: of that unit.
        cache: keys and values, once it has called a unit with them.
    """

    walk: Walk
    call: UnitCall
    cache: Any = None


class Wave:
    """Forwards in flight; they call the units of a model in one order.

    Args:
        session: streams the weights.
        boundaries: in the place of the units.
        on_output: given the number and the output of each that has ended, before the next one goes on.
    """

    def __init__(
        self, session: InferenceSession, boundaries: Boundaries, on_output: Callable[[int, Any], None]
    ) -> None:
        self._session, self._boundaries, self._on_output = session, boundaries, on_output
        self.flights: dict[int, _Flight] = {}

    def enter(self, number: int, walk: Walk) -> None:
        """Have a forward join, which takes part from the next pass on."""
        self._go_on(number, walk, walk.advance())

    def visit(
        self, waiting_bytes: int, *, measures: bool, leaves: Callable[[], bool] = lambda: False
    ) -> tuple[int, list[int]]:
        """Visit all units once.

        Args:
            waiting_bytes: that the forwards are expected to hold together between units, caches not counted.
            measures: whether what they hold is wanted.
            leaves: tells whether the first of several has left state that another would read; these end then.

        Returns what they have held, at most, and the numbers of those that have to begin again.

        Raises:
            InfeasiblePlanError: a forward takes too much.
        """
        at, most, first, again = -1, 0, next(iter(self.flights), None), list[int]()
        while units := [flight.call.unit for flight in self.flights.values() if flight.call.unit > at]:
            at = min(units)
            self._session.enter(at, self._extent, waiting_bytes)
            if measures:
                most = max(most, bytes_held(flight.call for flight in self.flights.values()))
            with self._session.weights_of(at) as weights:
                for number, flight in list(self.flights.items()):
                    if flight.call.unit != at:
                        continue
                    call, real = flight.call, self._boundaries.forwards[at]
                    if flight.cache is None:
                        flight.cache = find_cache(call.args, call.kwargs)
                    output = self._session.run(at, real, call.args, call.kwargs, weights, flight.cache)
                    self._go_on(number, flight.walk, flight.walk.advance(output))
                    others = [one for one in self.flights if one != number]
                    if number == first and others and leaves():
                        self.close(others)
                        again = others
                        break
            self._session.leave(at)
        return most, again

    def close(self, numbers: Sequence[int] | None = None) -> None:
        """Let go of forwards that have not ended; None for all."""
        for number in list(self.flights) if numbers is None else numbers:
            self.flights.pop(number).walk.close()

    def _go_on(self, number: int, walk: Walk, call: UnitCall | Finished) -> None:
        if isinstance(call, Finished):
            self.flights.pop(number, None)
            self._on_output(number, call.output)
        elif number in self.flights:
            self.flights[number].call = call
        else:
            self.flights[number] = _Flight(walk, call)

    def _extent(self) -> ForwardExtent:
        extents = [extent_of(flight.call.args, flight.call.kwargs) for flight in self.flights.values()]
        return ForwardExtent(max(one.rows for one in extents), max(one.length for one in extents))


def forward_together(
    session: InferenceSession,
    boundaries: Boundaries,
    starts: Sequence[Callable[[], Walk]],
    waiting_bytes: int,
    on_output: Callable[[int, Any], None],
    leaves: Callable[[], bool],
) -> int:
    """Run one forward each, unit by unit: all of them, or one behind the other where one leaves state on the model.

    Args:
        session: streams the weights.
        boundaries: in the place of the units.
        starts: each makes one of the forwards.
        waiting_bytes: that they are expected to hold together between units.
        on_output: see `Wave`.
        leaves: tells whether a forward so far has left state behind.

    Returns the bytes that they have held between units, at most.

    Raises:
        InfeasiblePlanError: a forward takes too much.
    """
    wave = Wave(session, boundaries, on_output)
    waiting, most = list(range(len(starts))), 0
    try:
        while waiting:
            while waiting and not (wave.flights and leaves()):
                number = waiting.pop(0)
                wave.enter(number, starts[number]())
            held, again = wave.visit(waiting_bytes, measures=True, leaves=leaves)
            most, waiting = max(most, held), again + waiting
        return most
    finally:
        wave.close()


class GenerationWave:
    """Generations in flight, which enter as there is room and leave as they end.

    Args:
        session: streams the weights.
        boundaries: in the place of the units.
        sizes: how far each generation goes on.
        in_flight: at most so many at once; None for as many as hide loading.
        on_output: see `Wave`.
        leaves: tells whether a generation so far has left state on the model, so that one goes behind the other.

    Attributes:
        most_rows: of all in flight, at most.
    """

    def __init__(
        self,
        session: InferenceSession,
        boundaries: Boundaries,
        sizes: Sequence[Growth],
        in_flight: int | None,
        on_output: Callable[[int, Any], None],
        leaves: Callable[[], bool],
    ) -> None:
        self._session, self._sizes, self._in_flight = session, sizes, in_flight
        self._on_output, self._leaves = on_output, leaves
        self._wave = Wave(session, boundaries, self._leave)
        self._break_even = LoadHiding()
        self._row_bytes: Mapping[int, float] = {}  # of keys and values, by the length of a row
        self._between_bytes = 0.0  # that a token of a prompt holds between units
        self._held: dict[int, int] = {}  # bytes that each in flight has a place for
        self.most_rows = 0

    def run(self, starts: Sequence[Callable[[], Any]]) -> None:
        """Run generations to their ends, in the order in which they are given.

        Raises:
            InfeasiblePlanError: one takes too much of the device.
        """
        waiting = iter(enumerate(starts))
        following = next(waiting, None)
        num_passes = 0
        try:
            while following is not None or self._held:
                num_before = len(self._held)
                # The first is alone for a pass over its prompt and one over a token: what they leave is seen.
                while following is not None and self._may_enter(following[0], num_passes):
                    number, start = following
                    self._held[number] = self._bytes_of(number)
                    self._wave.enter(number, Walk(start, {}))
                    following = next(waiting, None)
                if self._held:  # else all have ended before they called a unit
                    self._pass(not num_passes, has_new=len(self._held) != num_before)
                    num_passes += 1
        finally:
            self._wave.close()

    def _pass(self, is_first: bool, has_new: bool) -> None:
        rows = sum(self._sizes[number].rows for number in self._held)
        self.most_rows = max(self.most_rows, rows)
        first = next(iter(self._wave.flights.values()))
        sizes = [self._sizes[number] for number in self._held]
        between = sum(self._between_bytes * one.rows * (one.length - one.num_new) for one in sizes)
        before, began = self._session.statistics(), time.perf_counter()
        held, _ = self._wave.visit(int(between), measures=is_first)
        took = time.perf_counter() - began
        if is_first:
            self._learn(first.cache, sizes[0], held)
        if is_first or not has_new:  # a prompt costs more than the token that follows
            self._break_even.took(rows, took, before, self._session.statistics())

    def _learn(self, cache: Any, size: Growth, held: int) -> None:
        """Take from the first pass how much a generation holds, by its length."""
        self._between_bytes = held / (size.rows * max(size.length - size.num_new, 1))
        lengths = {align_up(one.length, LENGTH_STEP) for one in self._sizes} if cache is not None else set()
        self._row_bytes = {length: grown_bytes(cache, size.rows, length) / size.rows for length in lengths}
        for number in self._held:
            self._held[number] = self._bytes_of(number)

    def _bytes_of(self, number: int) -> int:
        size = self._sizes[number]
        row = self._row_bytes.get(align_up(size.length, LENGTH_STEP), 0.0)
        return int(size.rows * (row + self._between_bytes * (size.length - size.num_new)))

    def _may_enter(self, number: int, num_passes: int) -> bool:
        if not self._held:
            return True  # alone: the session finds room, or says what is short
        if not self._break_even.compute_s or num_passes < 2 or (len(self._held) == 1 and self._leaves()):
            return False
        if self._in_flight is not None and len(self._held) >= self._in_flight:
            return False
        rows = sum(self._sizes[one].rows for one in self._held) + self._sizes[number].rows
        if self._in_flight is None and rows > self._break_even.enough:
            return False
        return self._session.has_room_for(sum(self._held.values()) + self._bytes_of(number))

    def _leave(self, number: int, output: Any) -> None:
        self._held.pop(number, None)
        self._on_output(number, output)


def in_order(on_output: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return what takes outputs as they come, and hands them over in the order of their numbers."""
    early: dict[int, Any] = {}
    following = 0

    def take(number: int, output: Any) -> None:
        nonlocal following
        early[number] = output
        while following in early:
            on_output(following, early.pop(following))
            following += 1

    return take
