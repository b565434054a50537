"""Contracts as functions: what every home, scratch and device promises, for our tests and for those of others.

Each check takes a factory that makes a fresh object and raises AssertionError where a promise is broken. In a
test::

    @pytest.mark.parametrize("check", HOME_CONTRACT)
    def test_home(check):
        check(lambda model: MyHome(model, planes_for(model.dtype)))
"""

import threading
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from outsize.errors import BudgetExceededError
from outsize.model.spec import PLANE_ELEMENTS, ModelSpec, pack_unit
from outsize.optim.spec import planes_for
from outsize.runtime.device import Device
from outsize.storage.arena import Arena
from outsize.storage.home import Home
from outsize.storage.layout import COMPUTE_DTYPE
from outsize.storage.ledger import Ledger
from outsize.storage.scratch import Scratch

MakeHome = Callable[[ModelSpec], Home]
MakeScratch = Callable[[int, int], Scratch]
"""Number of extents and bytes of each to a scratch."""
MakeDevice = Callable[[Ledger | None], Device]


def small_model(dtype: str = "bf16") -> ModelSpec:
    """Return a model of four units: two trained ones, a frozen one and an empty one."""
    return ModelSpec(
        dtype=dtype,
        units=(
            pack_unit(0, "embed", "embedding", [("embed.weight", (300, 33), True, True)]),
            pack_unit(1, "block", "block", [("w", (70, 70), True, True), ("b", (7,), True, False)]),
            pack_unit(2, "frozen", "block", [("f", (50, 50), False, True)]),
            pack_unit(3, "tied", "head", []),
        ),
    )


def pattern(numel: int, dtype: torch.dtype, seed: int, arena: Arena) -> Tensor:
    """Return an aligned tensor of random bits, NaN patterns included: storage must not look at values."""
    tensor = arena.take(numel * dtype.itemsize, "pattern")
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator))
    return tensor.view(dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def raises(kind: type[BaseException], call: Callable[[], object]) -> bool:
    """Whether ``call`` raises ``kind``."""
    try:
        call()
    except kind:
        return True
    return False


# --- homes ------------------------------------------------------------------------------------------------


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
                assert same_bits(into, source), (dtype, unit, plane)
        home.close()


def check_home_moves_ranges(make: MakeHome) -> None:
    """A range is exactly the elements it names: tiles written in any order make the plane."""
    model = small_model()
    home = make(model)
    numel = model.units[0].numel
    with Arena() as arena:
        whole = pattern(numel, torch.float32, 5, arena)
        for start in reversed(range(0, numel, PLANE_ELEMENTS)):
            home.write(0, "exp_avg", start, whole[start : start + PLANE_ELEMENTS])
        into = pattern(numel - PLANE_ELEMENTS, torch.float32, 6, arena)
        home.read(0, "exp_avg", PLANE_ELEMENTS, into)
        assert same_bits(into, whole[PLANE_ELEMENTS:])
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
            assert same_bits(into[plane], source), plane
            assert same_bits(alone, source), plane
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
        assert home.statistics().bytes_read == home.statistics().bytes_written == 0
    home.close()


def check_home_counts_bytes(make: MakeHome) -> None:
    """Statistics count each byte that was asked for once."""
    home = make(small_model())
    with Arena() as arena:
        tile = pattern(PLANE_ELEMENTS, torch.float32, 1, arena)
        home.write(0, "master", 0, tile)
        home.read(0, "master", 0, tile)
        home.read_planes(0, 0, {"master": tile, "exp_avg": pattern(PLANE_ELEMENTS, torch.float32, 1, arena)})
    statistics = home.statistics()
    assert statistics.bytes_written == 4 * PLANE_ELEMENTS
    assert statistics.bytes_read == 3 * 4 * PLANE_ELEMENTS
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
                    if not same_bits(into, source):
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
    check_home_counts_bytes,
    check_home_serves_threads_at_once,
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


# --- scratches --------------------------------------------------------------------------------------------


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
    statistics = scratch.statistics()
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert (statistics.num_held, statistics.high_water) == (0, 8)
    assert (statistics.bytes_in, statistics.bytes_out) == (num_bytes, num_bytes)
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


SCRATCH_CONTRACT: tuple[Callable[[MakeScratch], None], ...] = (
    check_scratch_put_then_take_changes_nothing,
    check_scratch_does_not_alias,
    check_scratch_reuses_extents,
    check_scratch_refuses_what_does_not_fit,
)


# --- devices ----------------------------------------------------------------------------------------------


def check_device_memory_is_aligned_and_lies_on_it(make: MakeDevice) -> None:
    """Every allocation has the size asked for, on the device, aligned for DMA, apart from all others."""
    device = make(None)
    sizes = (1, 4096, 10_000)
    tensors = [device.allocate(size, "x") for size in sizes]
    for value, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert (tensor.dtype, tensor.shape) == (torch.uint8, (size,))
        assert tensor.device == device.torch_device
        assert tensor.data_ptr() % 512 == 0
        tensor.fill_(value)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))
    device.close()


def check_device_memory_is_reserved_until_closed(make: MakeDevice) -> None:
    """The ledger knows every byte; beyond the budget nothing is allocated; closing gives everything back, twice."""
    ledger = Ledger({"device": 3 * 4096})
    device = make(ledger)
    device.allocate(8192, "x")
    assert ledger.used("device") == 8192
    assert raises(BudgetExceededError, lambda: device.allocate(8192, "y"))
    assert ledger.used("device") == 8192
    device.allocate(4096, "z")
    device.close()
    assert ledger.used("device") == 0
    device.close()


def check_device_copies_both_ways(make: MakeDevice) -> None:
    """What goes up and comes down again is the same bits, by way of two lanes and their marks."""
    device = make(None)
    with Arena() as arena:
        for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.uint8)):
            source = pattern(4096, dtype, seed, arena)
            back = pattern(4096, dtype, 99, arena)
            slot = device.allocate(source.nbytes, "slot").view(dtype)
            with device.lane("up:w0"):
                device.copy(slot, source)
                mark = device.record("up:w0")
            with device.lane("down:w0"):
                if mark is not None:
                    device.wait("down:w0", mark)
                device.copy(back, slot)
                mark = device.record("down:w0")
            if mark is not None:
                device.wait("host", mark)
            assert same_bits(back, source), dtype
    device.close()


def check_device_orders_lanes_by_marks(make: MakeDevice) -> None:
    """A lane that waits for a mark sees all that was done before it, however often the memory is used again."""
    device = make(None)
    slot = device.allocate(4 * 2**16, "slot").view(torch.float32)
    sums = []
    mark = None
    for value in range(20):
        with device.lane("up:w0"):
            if mark is not None:
                device.wait("up:w0", mark)
            device.copy(slot, torch.full((2**16,), float(value)))
            mark = device.record("up:w0")
        with device.lane("compute:w0"):
            if mark is not None:
                device.wait("compute:w0", mark)
            sums.append(slot.sum())
            device.hold(sums[-1], "compute:w0")
            mark = device.record("compute:w0")
    if mark is not None:
        device.wait("host", mark)
    assert [total.item() for total in sums] == [value * 2**16 for value in range(20)]
    device.close()


DEVICE_CONTRACT: tuple[Callable[[MakeDevice], None], ...] = (
    check_device_memory_is_aligned_and_lies_on_it,
    check_device_memory_is_reserved_until_closed,
    check_device_copies_both_ways,
    check_device_orders_lanes_by_marks,
)
