"""Contracts that homes and scratch files keep.

What every home promises, see `outsize.storage.home`.

What every scratch promises, see `outsize.storage.scratch`.
"""

import threading
from collections.abc import Callable
from itertools import product

import torch

from contracts.device_contract import pattern, raises, same_values, small_model
from outsize.errors import BudgetExceededError
from outsize.model.sizes.model_spec import PLANE_ELEMENTS, ModelSpec
from outsize.optim.optimizer_spec import ITEM_BYTES, StateLayout
from outsize.storage.home import Home
from outsize.storage.home_layout import COMPUTE_DTYPE
from outsize.storage.ledger import Arena
from outsize.storage.scratch import Scratch

MakeHome = Callable[[ModelSpec], Home]


def planes_for(dtype: str) -> dict[str, int]:
    """Return the planes of a plain layout and their bytes per element, for compute dtype ``dtype``.

    Units that are not trained have ``weights`` only.

    Raises:
        ValueError: unknown dtype.
    """
    return {name: ITEM_BYTES[plane.item] for name, plane in StateLayout(dtype=dtype).planes.items()}


def check_home_reads_zeros_where_nothing_was_written(make: MakeHome) -> None:
    """A plane that was never written reads as zeros."""
    model = small_model()
    home = make(model)
    with Arena() as arena:
        for (unit, plane), dtype in _planes_of(model).items():
            into = pattern(model.units[unit].numel, dtype, 1, arena)
            home.read(unit, plane, 0, into)
            assert not into.view(torch.uint8).any(), (unit, plane)
    home.close()


def check_home_returns_what_was_written(make: MakeHome) -> None:
    """Every plane of every unit keeps its own bits, in each compute dtype."""
    for dtype in COMPUTE_DTYPE:
        model = small_model(dtype)
        home = make(model)
        with Arena() as arena:
            written = {}
            for seed, ((unit, plane), torch_dtype) in enumerate(_planes_of(model).items()):
                written[unit, plane] = pattern(model.units[unit].numel, torch_dtype, seed, arena)
                home.write(unit, plane, 0, written[unit, plane])
            for (unit, plane), source in written.items():
                into = pattern(source.numel(), source.dtype, 99, arena)
                home.read(unit, plane, 0, into)
                assert same_values(into, source), (dtype, unit, plane)
        home.close()


def check_home_moves_ranges(make: MakeHome) -> None:
    """A range is exactly the elements it names: tiles written in any order make the plane."""
    model = small_model()
    home = make(model)
    numel = model.units[0].numel
    with Arena() as arena:
        values = pattern(numel, torch.float32, 5, arena)
        for start in reversed(range(0, numel, PLANE_ELEMENTS)):
            home.write(0, "exp_avg", start, values[start : start + PLANE_ELEMENTS])
        into = pattern(numel - PLANE_ELEMENTS, torch.float32, 6, arena)
        home.read(0, "exp_avg", PLANE_ELEMENTS, into)
        assert same_values(into, values[PLANE_ELEMENTS:])
    home.close()


def check_home_moves_planes_together(make: MakeHome) -> None:
    """`read_planes` and `write_planes` do what `read` and `write` do plane by plane."""
    model = small_model()
    home = make(model)
    with Arena() as arena:
        size = 2 * PLANE_ELEMENTS
        planes = planes_for(model.dtype)
        sources = {
            plane: pattern(size, _planes_of(model)[0, plane], seed, arena)
            for seed, plane in enumerate(planes)
        }
        home.write_planes(0, PLANE_ELEMENTS, sources)
        into = {plane: pattern(size, source.dtype, 77, arena) for plane, source in sources.items()}
        home.read_planes(0, PLANE_ELEMENTS, into)
        for plane, source in sources.items():
            alone = pattern(size, source.dtype, 78, arena)
            home.read(0, plane, PLANE_ELEMENTS, alone)
            assert same_values(into[plane], source), plane
            assert same_values(alone, source), plane
    home.close()


def check_home_refuses_what_does_not_fit(make: MakeHome) -> None:
    """Unknown planes, other dtypes and ranges that are odd or outside are ValueError and change nothing."""
    home = make(small_model())
    with Arena() as arena:
        good = pattern(PLANE_ELEMENTS, torch.float32, 1, arena)
        narrow = pattern(PLANE_ELEMENTS, torch.bfloat16, 1, arena)
        bad_calls = [
            (0, "velocity", 0, good),
            (2, "exp_avg", 0, good),
            (3, "weights", 0, narrow),
            (9, "weights", 0, narrow),
            (0, "exp_avg", 0, narrow),
            (0, "exp_avg", 64, good),
            (0, "exp_avg", -PLANE_ELEMENTS, good),
            (0, "exp_avg", 0, good[:64]),
            (0, "exp_avg", 2**20, good),
        ]
        for arguments, method in product(bad_calls, (home.read, home.write)):
            assert raises(ValueError, lambda m=method, a=arguments: m(*a)), arguments  # type: ignore[misc]
    home.close()


def check_home_serves_threads_at_once(make: MakeHome) -> None:
    """Threads that use different ranges do not disturb each other."""
    model = small_model()
    home = make(model)
    failures: list[object] = []
    planes = [key for key, dtype in _planes_of(model).items() if dtype is torch.float32]
    barrier = threading.Barrier(len(planes))

    def work(seed: int, unit: int, plane: str) -> None:
        try:
            with Arena() as arena:
                source = pattern(model.units[unit].numel, torch.float32, seed, arena)
                into = pattern(source.numel(), torch.float32, 1000, arena)
                barrier.wait()
                for _ in range(5):
                    home.write(unit, plane, 0, source)
                    home.read(unit, plane, 0, into)
                    if not same_values(into, source):
                        failures.append((unit, plane))
        except BaseException as error:
            barrier.abort()
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed, *key)) for seed, key in enumerate(planes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    home.close()
    assert not failures, failures


def check_home_lends_what_it_holds(make: MakeHome) -> None:
    """What is lent is the plane itself: written through it, read from the home; else there is nothing to view."""
    model = small_model()
    home = make(model)
    elements = range(PLANE_ELEMENTS, 2 * PLANE_ELEMENTS)
    with Arena() as arena:
        for seed, (unit, plane) in enumerate(_planes_of(model)):
            lent = home.lend(unit, plane)
            if lent is None:
                assert raises(ValueError, lambda u=unit, p=plane: home.view(u, p))  # type: ignore[misc]
                continue
            assert home.in_memory
            source = pattern(lent.numel(), lent.dtype, seed, arena)
            lent.copy_(source)
            into = pattern(lent.numel(), lent.dtype, 99, arena)
            home.read(unit, plane, 0, into)
            assert same_values(into, source), (unit, plane)
            part = home.view(unit, plane, elements)
            assert same_values(part, source[PLANE_ELEMENTS : 2 * PLANE_ELEMENTS]), (unit, plane)
    assert raises(ValueError, lambda: home.view(9, "weights"))
    home.close()


def check_home_reads_ranges(make: MakeHome) -> None:
    """`read_ranges` fills each range as `read` does."""
    home = make(small_model())
    numel = small_model().units[0].numel
    with Arena() as arena:
        source = pattern(numel, torch.float32, 3, arena)
        home.write(0, "exp_avg", 0, source)
        starts = range(0, numel, PLANE_ELEMENTS)
        pieces = [pattern(PLANE_ELEMENTS, torch.float32, start, arena) for start in starts]
        home.read_ranges(0, "exp_avg", list(zip(starts, pieces, strict=True)))
        assert same_values(torch.cat(pieces), source)
    home.close()


def check_home_closes_twice(make: MakeHome) -> None:
    """A second close does nothing."""
    home = make(small_model())
    home.close()
    home.close()


HOME_CONTRACT: tuple[Callable[[MakeHome], None], ...] = (
    check_home_reads_zeros_where_nothing_was_written,
    check_home_returns_what_was_written,
    check_home_moves_ranges,
    check_home_moves_planes_together,
    check_home_refuses_what_does_not_fit,
    check_home_serves_threads_at_once,
    check_home_lends_what_it_holds,
    check_home_reads_ranges,
    check_home_closes_twice,
)


def _planes_of(model: ModelSpec) -> dict[tuple[int, str], torch.dtype]:
    """Return the planes that a home of ``model`` must have, by unit and name."""
    compute = COMPUTE_DTYPE[model.dtype]
    return {
        (unit.index, plane): compute if plane == "weights" else torch.float32
        for unit in model.units
        for plane in planes_for(model.dtype)
        if unit.numel and (unit.trainable or plane == "weights")
    }


MakeScratch = Callable[[int, int], Scratch]
"""Number of extents and bytes of each to a scratch."""


def check_scratch_put_then_take_changes_nothing(make: MakeScratch) -> None:
    """A put followed by a take is observationally a copy, whatever dtype, shape and address."""
    scratch = make(8, 40_000)
    storage = torch.arange(50_000, dtype=torch.float32)
    tensors = {
        ("x", 0): storage[:10_000],
        ("x", 1): storage[3:9_003].view(3, 3000),
        ("x", 2): storage[:777].to(torch.bfloat16),
        ("x", 3): torch.tensor(3.5),
        ("x", 4): storage[:5000].to(torch.int64),
        ("x", 5): storage[:99] > 5,
        ("x", 6): torch.empty(0),
        ("x", 7): torch.full((7, 11), float("nan"), dtype=torch.float16),
    }
    for key, tensor in tensors.items():
        scratch.put(key, tensor)
    for key, tensor in reversed(tensors.items()):
        into = torch.zeros_like(tensor)
        scratch.take(key, into)
        assert torch.equal(into, tensor) or torch.isnan(tensor).all(), key
    assert scratch.num_held == 0
    scratch.close()


def check_scratch_does_not_alias(make: MakeScratch) -> None:
    """The tensor may change after a put; what is taken is what was put."""
    scratch = make(1, 4096)
    tensor = torch.arange(1024, dtype=torch.int32)
    scratch.put(0, tensor)
    tensor.zero_()
    scratch.take(0, tensor)
    assert torch.equal(tensor, torch.arange(1024, dtype=torch.int32))
    scratch.close()


def check_scratch_reuses_extents(make: MakeScratch) -> None:
    """An extent is free again when its tensor has been taken; one too many is refused and harms none."""
    scratch = make(2, 4096)
    for round_ in range(5):
        scratch.put("a", torch.full((1000,), float(round_)))
        scratch.put("b", torch.full((10,), -float(round_)))
        assert raises(BudgetExceededError, lambda: scratch.put("c", torch.zeros(1)))
        for key, value in (("a", float(round_)), ("b", -float(round_))):
            into = torch.empty(1000 if key == "a" else 10)
            scratch.take(key, into)
            assert (into == value).all()
    scratch.close()


def check_scratch_refuses_what_does_not_fit(make: MakeScratch) -> None:
    """Too large, put twice, never put, another dtype or size: ValueError, and what is held stays."""
    scratch = make(2, 4000)
    scratch.put("a", torch.ones(1000))
    assert raises(ValueError, lambda: scratch.put("b", torch.zeros(1001)))
    assert raises(ValueError, lambda: scratch.put("a", torch.zeros(1)))
    assert raises(ValueError, lambda: scratch.take("b", torch.zeros(1)))
    assert raises(ValueError, lambda: scratch.take("a", torch.zeros(999)))
    assert raises(ValueError, lambda: scratch.take("a", torch.zeros(1000, dtype=torch.int32)))
    into = torch.zeros(1000)
    scratch.take("a", into)
    assert (into == 1).all()
    assert raises(ValueError, lambda: scratch.take("a", into))
    scratch.close()
    scratch.close()


def check_scratch_puts_several_tensors_into_one_extent(make: MakeScratch) -> None:
    """What belongs together goes and comes back together, each tensor as it was; too much of it is refused."""
    scratch = make(2, 4 * 4096)
    storage = torch.arange(4000, dtype=torch.float32)
    parts = [storage[1:900], torch.tensor([True]), torch.empty(0), storage[:10].to(torch.bfloat16)]
    assert scratch.holds(*parts)
    scratch.put("a", *parts)
    scratch.put("b", *parts[:1])
    for key, wanted in (("b", parts[:1]), ("a", parts)):
        into = [torch.zeros_like(part) for part in wanted]
        scratch.take(key, *into)
        assert all(torch.equal(one, other) for one, other in zip(into, wanted, strict=True))
    assert not scratch.holds(*[storage[:1025]] * 3)
    assert raises(ValueError, lambda: scratch.put("a", *[storage[:1025]] * 3))
    assert raises(ValueError, lambda: scratch.take("a", *parts))
    assert scratch.num_held == 0
    scratch.close()


SCRATCH_CONTRACT: tuple[Callable[[MakeScratch], None], ...] = (
    check_scratch_put_then_take_changes_nothing,
    check_scratch_does_not_alias,
    check_scratch_reuses_extents,
    check_scratch_refuses_what_does_not_fit,
    check_scratch_puts_several_tensors_into_one_extent,
)
