"""The limit of resident memory: when it trims, when it comes back down, and that watching keeps nothing alive."""

import gc
import weakref

import pytest
import torch

from outsize.runtime.device import allocator
from outsize.runtime.device.heap import AGAIN_BYTES, TOLERANCE_BYTES, ResidentLimit

MIB = 2**20
START, BUDGET, HOST = 300 * MIB, 100 * MIB, 50 * MIB
LIMIT = START + BUDGET + HOST + TOLERANCE_BYTES


class Memory:
    """A process whose resident memory is what a test says; a trim takes ``free`` of it."""

    def __init__(self) -> None:
        self.resident = START
        self.free = 0
        self.num_trims = 0

    def trim(self) -> None:
        self.num_trims += 1
        self.resident -= self.free
        self.free = 0


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    process = Memory()
    monkeypatch.setattr(allocator, "resident_bytes", lambda: process.resident)
    monkeypatch.setattr(allocator, "trim", process.trim)
    monkeypatch.setattr(allocator, "LOOK_S", 0.0)
    return process


def test_nothing_is_handed_back_within_the_limit(memory: Memory):
    limit = ResidentLimit(START, BUDGET, HOST)
    memory.resident = LIMIT
    limit.keep()
    assert memory.num_trims == 0


def test_free_memory_over_the_limit_is_handed_back(memory: Memory):
    limit = ResidentLimit(START, BUDGET, HOST)
    memory.resident, memory.free = LIMIT + 1, 40 * MIB
    limit.keep()
    assert (memory.num_trims, memory.resident) == (1, LIMIT + 1 - 40 * MIB)


def test_what_a_trim_leaves_is_alive_and_is_not_trimmed_at_every_look(memory: Memory):
    limit = ResidentLimit(START, BUDGET, HOST)
    memory.resident = LIMIT + 20 * MIB
    limit.keep()
    limit.keep()
    memory.resident += AGAIN_BYTES
    limit.keep()
    assert memory.num_trims == 1
    memory.resident += 1
    limit.keep()
    assert memory.num_trims == 2


def test_the_limit_comes_back_down_when_the_live_memory_is_gone(memory: Memory):
    limit = ResidentLimit(START, BUDGET, HOST)
    memory.resident = LIMIT + 100 * MIB
    limit.keep()
    memory.resident = LIMIT - 50 * MIB
    limit.keep()
    memory.resident, memory.free = LIMIT + 1, 30 * MIB
    limit.keep()
    assert memory.num_trims == 2


def test_between_two_looks_some_time_passes(memory: Memory, monkeypatch: pytest.MonkeyPatch):
    now_s = 100.0
    monkeypatch.setattr(allocator.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(allocator, "LOOK_S", 0.5)
    limit = ResidentLimit(START, BUDGET, HOST)
    limit.keep()
    memory.resident, memory.free = LIMIT + 1, MIB
    limit.keep()
    assert memory.num_trims == 0
    now_s += 0.5
    limit.keep()
    assert memory.num_trims == 1


def test_the_limit_is_kept_in_the_middle_of_a_backward(memory: Memory):
    limit = ResidentLimit(START, BUDGET)
    weight = torch.ones(3, requires_grad=True)
    with limit.watched():
        loss = (weight.exp() * weight).sum()
        memory.resident = LIMIT + MIB
        loss.backward()
    assert memory.num_trims == 1
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * torch.ones(3).exp())


def test_a_watched_graph_without_a_backward_is_freed(memory: Memory):
    """A result that its own graph saves (exp does) would hold itself through the hooks."""
    with ResidentLimit(START, BUDGET).watched():
        result = torch.ones(3, requires_grad=True).exp()
    gone = weakref.ref(result)
    del result
    gc.collect()
    assert gone() is None


def test_a_real_look_sees_this_process():
    assert allocator.resident_bytes() > 50 * MIB
    allocator.trim()
