"""What every scratch promises, see `outsize.storage.scratch`."""

from collections.abc import Callable

import torch

from outsize.errors import BudgetExceededError
from outsize.storage.scratch import Scratch
from outsize.testing.samples import raises

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
    assert scratch.statistics().num_held == 0
    scratch.close()


SCRATCH_CONTRACT: tuple[Callable[[MakeScratch], None], ...] = (
    check_scratch_put_then_take_changes_nothing,
    check_scratch_does_not_alias,
    check_scratch_reuses_extents,
    check_scratch_refuses_what_does_not_fit,
    check_scratch_puts_several_tensors_into_one_extent,
)
