"""Forwards of a model whose weights are not where it computes: its own code runs, weights come and go under it.

The story of a pass:

1. The model's code, in the caller's thread, calls a unit; the boundary in its place asks for the unit's weights.
2. They are kept, or the loader has brought them up meanwhile, or the caller waits. The unit's parameters become views
   of them, and its own forward runs.
3. Its slot is free, and the loader goes on in it: behind the last unit with the first one of the next pass.

The first pass holds nothing but slots, and measures what computing takes. Units stay in what is left from the second
pass on, the rest of the model and the cache of keys and values counted; as the cache grows, units give way to it one
after the other. A later pass that is larger than any before holds what is left beside an estimate, or nothing but slots
where that leaves nothing; only what was measured is a reason to refuse it, after the first unit that takes too much.
And before the first token is chosen, the cache of all tokens to come has to have a place, on the device or the host.
A byte of weights and one of cache are both read once per token: either may stay, and a unit is not written back.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from outsize.accelerators import as_current
from outsize.errors import InfeasiblePlanError
from outsize.inference.experts import ExpertCache, ExpertStatistics, find_experts, without
from outsize.inference.kv_cache import (
    ForwardExtent,
    Growth,
    HostedCache,
    Workspace,
    bytes_above,
    cache_bytes,
    check_growth,
    extent_of,
    find_cache,
    grown_bytes,
    hosted_bytes,
    ordinary,
)
from outsize.inference.loader import Caller, Loader
from outsize.inference.source import Source, Table, is_table
from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.planner.search.forward_plan import Scan, plan_scan
from outsize.runtime.device.device import Device
from outsize.runtime.forward.binding import Binder

# Room that is kept free for a cache to grow into, as a share of it, so that units do not give way at every token.
CACHE_AHEAD = 8
ESTIMATE_SHARE = 0.9  # of room that is filled by what smaller forwards took


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceStatistics:
    """What a session has done.

    Attributes:
        num_passes: forwards that came to the last unit.
        bytes_moved: weights that came from their home.
        stall_s: seconds that computing waited for them.
        load_s: seconds that loading them took; where copies are asynchronous, that handing them over took.
        num_kept: units that stay on the device.
        num_streamed: units that come up in every pass.
        bytes_per_pass: weights that come up in every pass, rows of embeddings not counted.
        workspace_bytes: most that a forward took beside weights and cache.
        cache_bytes: keys and values, as of the last pass.
        cache_bytes_moved: of them, between device and host, where a cache rests on the host.
        experts: those that are fetched one by one; None where there are none.
    """

    num_passes: int
    bytes_moved: int
    stall_s: float
    load_s: float
    num_kept: int
    num_streamed: int
    bytes_per_pass: int
    workspace_bytes: int
    cache_bytes: int
    cache_bytes_moved: int
    experts: ExpertStatistics | None


class _NoGradients:
    """A gradient sink that nothing falls into."""

    def hook(self, unit: int, position: int) -> Callable[[Tensor], None]:
        return lambda _: None


class InferenceSession:
    """Streams one model; used by one thread at a time.

    Args:
        split: the model.
        boundaries: in the place of its units.
        device: computes; closed with the session.
        source: its weights; closed with the session.
        open_room: see `Loader`.
        room_bytes: of the device, for weights, workspace and cache.
        prefetch: units loaded ahead; None lets the planner choose.

    Raises:
        InfeasiblePlanError: not even the largest unit fits.
    """

    def __init__(
        self,
        split: Split,
        boundaries: Boundaries,
        device: Device,
        source: Source,
        open_room: Callable[[], Device],
        room_bytes: int,
        prefetch: int | None,
    ) -> None:
        experts = find_experts(split)
        self._experts = ExpertCache(experts, source)
        split = without(split, experts)
        source.partly = {one.unit: split.spec.units[one.unit] for one in experts}
        self._split = split
        self._boundaries = boundaries
        self._device = device
        self._source = source
        self._prefetch = prefetch
        self._caller = Caller(device.torch_device)
        units, dtype = split.spec.units, split.spec.dtype
        self._tables = {
            unit.index: Table(module, unit, source)
            for unit, module in zip(units, split.modules, strict=False)
            if is_table(module, unit)
        }
        self._last = len(split.modules) - 1
        self._unit_bytes = tuple(
            0 if unit.kind == "rest" or unit.index in self._tables else unit.weight_bytes(dtype)
            for unit in units
        )
        self._rest = units[-1] if units[-1].kind == "rest" else None
        rest_bytes = 0 if self._rest is None else self._rest.weight_bytes(dtype)
        self._room_bytes = room_bytes - rest_bytes
        self._workspace = Workspace(dtype)
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()  # that this pass has come upon
        self._hosted: weakref.WeakKeyDictionary[Any, HostedCache] = weakref.WeakKeyDictionary()
        self._has_room: weakref.WeakSet[Any] = weakref.WeakSet()  # caches that may grow as far as they are to
        self._growth: Growth | None = None
        self._cache_bytes = self._cache_moved = self._num_passes = self._depth = self._waiting_bytes = 0
        self._bound: dict[int, int] = {}
        self._at = self._last
        with contextlib.ExitStack() as stack, ordinary():
            stack.callback(device.close)
            stack.callback(source.close)
            self._loader = Loader(device, self._caller, source, self._unit_bytes, open_room)
            stack.callback(self._loader.close)
            self._scan = plan_scan(self._unit_bytes, self._room_bytes, prefetch=prefetch, sparing=True)
            self._rest_memory = device.allocate(rest_bytes, "rest")
            self._binder = Binder(split, _NoGradients())
            if self._rest is not None:  # in the caller's order, which places that are allocated wait for
                source.load(self._rest.index, self._rest_memory)
            self._loader.follow(self._scan)
            # Nothing in it holds the model: it ends with this session, whether or not anybody closes it.
            self._end = weakref.finalize(self, stack.pop_all().close)

    @contextlib.contextmanager
    def active(self, growth: Growth | None = None) -> Iterator[None]:
        """Have the model's own forward compute here while the context lasts.

        Args:
            growth: how far a generation goes on, whose cache has to have room before its first token, if known.
        """
        self._depth += 1
        if self._depth == 1:
            self._growth = growth
            self._has_room.clear()  # a cache that is used again is to grow further
        try:
            if self._depth == 1:
                self._boundaries.outside = self._unit
                self._bind_rest()
            experts = self._experts.active() if self._depth == 1 else nullcontext()
            with as_current(self._device.torch_device), experts:
                yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._boundaries.outside = None
                for unit in self._split.spec.units:
                    self._binder.unbind(unit)
                self._bound.clear()

    def statistics(self) -> InferenceStatistics:
        """Return counts of passes, bytes and seconds since the session was opened."""
        return InferenceStatistics(
            num_passes=self._num_passes,
            bytes_moved=self._source.bytes_moved,
            stall_s=self._loader.stall_s + self._caller.waited_s(),
            load_s=self._loader.load_s,
            num_kept=len(self._scan.kept),
            num_streamed=len(self._scan.streamed),
            bytes_per_pass=self._scan.bytes_per_pass,
            workspace_bytes=self._workspace.known_bytes,
            cache_bytes=self._cache_bytes,
            cache_bytes_moved=self._cache_moved,
            experts=self._experts.statistics(),
        )

    def close(self) -> None:
        """End the loader and give everything back; idempotent."""
        self._binder.close()
        self._end()

    def _unit(
        self, unit: int, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What a unit's boundary calls in its place."""
        self.enter(unit, partial(extent_of, args, kwargs))
        cache = next(iter(self._caches), None)
        cache = find_cache(args, kwargs) if cache is None else cache
        with self.weights_of(unit) as weights:
            output = self.run(unit, real, args, kwargs, weights, cache)
        self.leave(unit)
        return output

    @property
    def room_for_waiting(self) -> int:
        """Bytes that forwards may hold together between units: half of what slots and one forward leave."""
        slots = max(self._scan.num_slots * self._scan.slot_bytes, self._loading_bytes)
        return max((self._room_bytes - self._workspace.known_bytes - slots) // 2, 0)

    @property
    def _loading_bytes(self) -> int:
        """Of a unit that computes and one that comes up meanwhile."""
        return min(2 * max(self._unit_bytes), sum(self._unit_bytes))

    def tokens_beside_loading(self, waiting_bytes: int) -> int:
        """Return the tokens of a forward that leaves room for a unit to come up, by what the largest so far took.

        Args:
            waiting_bytes: that forwards hold together between units.
        """
        room = self._room_bytes - waiting_bytes - self._loading_bytes
        return int(ESTIMATE_SHARE * room / max(self._workspace.bytes_per_token, 1.0))

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether forwards may hold so many bytes, keys and values too, beside the slots of units and one forward."""
        return not (self._hosted or self._short_beside(num_bytes))

    def _short_beside(self, num_bytes: int) -> Mapping[str, int]:
        room = self._room_bytes - self._workspace.known_bytes - num_bytes
        try:
            plan_scan(self._unit_bytes, room, prefetch=self._prefetch)
        except InfeasiblePlanError as error:
            return error.short_by
        return {}

    def enter(self, unit: int, extent: Callable[[], ForwardExtent], waiting_bytes: int = 0) -> None:
        """Forwards come to a unit; to one that is not behind the last, with a new pass.

        Args:
            unit: which.
            extent: of the largest of them.
            waiting_bytes: that they hold together between units; weights give way to them.
        """
        if unit <= self._at:
            self._waiting_bytes = waiting_bytes
            self._begin(extent())
        self._at = unit

    def leave(self, unit: int) -> None:
        """Forwards have been through a unit.

        Raises:
            InfeasiblePlanError: it took too much, or what is generated will have no room.
        """
        if measured := self._workspace.measured_bytes:
            room = self._room_bytes - self._waiting_bytes - measured
            plan_scan(self._unit_bytes, room, prefetch=self._prefetch)  # or it is refused
        if unit == self._last:
            self._workspace.end()
            self._num_passes += 1
            if self._growth is not None:
                for cache in self._caches - self._has_room:
                    self._has_room.add(cache)
                    check_growth(cache, self._growth, partial(self._shortage, cache))

    @contextlib.contextmanager
    def weights_of(self, unit: int) -> Iterator[Tensor]:
        """Have the weights of a unit in place; rows of a table, and what is tied and lies in the rest, need no slot."""
        if unit in self._tables or not self._unit_bytes[unit]:
            yield self._rest_memory
            return
        with ordinary():
            weights = self._loader.take(unit)
        try:
            self._bind(unit, weights)
            yield weights[0]
        finally:
            self._loader.give_back(unit)

    def _begin(self, extent: ForwardExtent) -> None:
        """A pass begins: keep what fits beside what it will take."""
        first = not self._workspace.known_bytes
        expected = self._workspace.expected_bytes(extent)
        is_larger = self._workspace.begin(extent)
        caches = list(self._caches)
        self._caches.clear()
        self._cache_bytes = sum(cache_bytes(cache, cache in self._hosted) for cache in caches)
        cache = caches[0] if len(caches) == 1 else None  # of several, all have room where they are
        if first:
            return
        room = self._room_bytes - self._waiting_bytes - expected
        try:
            scan = self._plan(cache, room, may_host=not is_larger)
        except InfeasiblePlanError:
            if not is_larger:
                raise
            room = self._room_bytes - self._waiting_bytes
            scan = self._plan(cache, room, sparing=True)
        self._experts.shrink(max(room - 2 * self._cache_bytes - scan.device_bytes, 0))
        if scan != self._scan:
            self._binder.close()
            self._bound.clear()
            self._bind_rest()
            self._scan = scan
            with ordinary():
                self._loader.follow(scan)

    def _plan(self, cache: Any, room_bytes: int, *, may_host: bool = True, sparing: bool = False) -> Scan:
        """Units give way to the cache; a cache that leaves no room for slots goes to the host, for good."""
        held = self._cache_bytes
        plan = partial(plan_scan, self._unit_bytes, prefetch=self._prefetch, sparing=sparing)
        if cache is None or cache not in self._hosted:
            for cached in (held + held // CACHE_AHEAD, held):
                with contextlib.suppress(InfeasiblePlanError):
                    return plan(room_bytes - cached)
            if cache is None or self._device.in_place or not may_host:
                return plan(room_bytes - held)
            self._hosted[cache] = HostedCache(self._device, self._split.modules, self._source.new_arena())
        return plan(room_bytes - bytes_above(cache, held + held // CACHE_AHEAD))

    def _shortage(self, cache: Any, growth: Growth) -> Mapping[str, int]:
        """Return what a cache lacks, by memory: its place is on the device, or on the host and for a layer above."""
        grown = max(grown_bytes(cache, growth.rows, growth.length), cache_bytes(cache, cache in self._hosted))
        if cache not in self._hosted:
            shortage = self._short_beside(grown)
            if not shortage or self._device.in_place:
                return shortage
        shortage = self._short_beside(bytes_above(cache, grown + grown // CACHE_AHEAD))
        short = self._lacks_on_host(cache, growth)
        return {**shortage, "host": short} if short else shortage

    def _lacks_on_host(self, cache: Any, growth: Growth) -> int:
        """Return the bytes by which a cache is too large to rest on the host when it has grown; 0 where it is not."""
        needed = hosted_bytes(cache, growth.rows, growth.length, reorders=growth.reorders)
        held = self._hosted[cache].num_bytes if cache in self._hosted else 0
        return max(0, needed - held - int(min(self._source.ledger.left("host"), needed)))

    def run(
        self, unit: int, real: Callable[..., Any], args: Any, kwargs: Any, weights: Tensor, cache: Any
    ) -> Any:
        """Run a unit on its weights, with its part of a cache that rests on the host.

        Args:
            unit: which.
            real: its forward.
            args: of the forward.
            kwargs: of the forward.
            weights: see `weights_of`.
            cache: keys and values that the forward takes and adds to, or None.
        """
        if cache is not None:
            self._caches.add(cache)
        if unit in self._tables:
            return self._tables[unit].run(real, args, kwargs)
        hosted = self._hosted.get(cache) if cache is not None else None
        before = hosted.bytes_moved if hosted is not None else 0
        length = self._growth.length if self._growth else 0
        with nullcontext() if hosted is None else hosted.up(cache, unit, length):
            output = self._workspace.run(real, args, kwargs, weights, unit == self._last)
        self._cache_moved += hosted.bytes_moved - before if hosted is not None else 0
        return output

    def _bind(self, unit: int, weights: tuple[Tensor, ...]) -> None:
        place = weights[0].untyped_storage().data_ptr()
        if self._bound.get(unit) != place:
            with ordinary():
                self._binder.bind(self._split.spec.units[unit], *weights)
            self._bound[unit] = place

    def _bind_rest(self) -> None:
        if self._rest is not None:
            self._binder.bind(self._rest, *self._source.planes(self._rest.index, self._rest_memory))
