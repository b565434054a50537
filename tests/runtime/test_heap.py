"""The heap of a process: what is free is handed back, threads share one arena, and resident memory has a limit.

Settings of malloc hold for a process and for good, so each test of them asks a process of its own. Of the limit: when
it trims, when it comes back down, and that watching keeps nothing alive.
"""

import ctypes
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from outsize.runtime.device import heap
from outsize.runtime.device.heap import AGAIN_BYTES, TOLERANCE_BYTES, ResidentLimit
from patience import PATIENCE_S

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not GNU's"
)

# What of the environment changes how torch and the C library take memory.
CHOICES = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_ARENA_MAX", "THP_MEM_ALLOC_ENABLE")
BEGIN = """
import ctypes, torch
from outsize.runtime.device.heap import own_process, set_thresholds, trim
"""
ARENAS = """
import threading
def arenas():
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    return text.value.count(b"<heap nr=")
def arenas_of_a_thread():
    thread = threading.Thread(target=lambda: torch.ones(2**18))
    thread.start()
    thread.join()
    return arenas()
"""


def said(code: str, **environ: str) -> str:
    """What a process prints that runs ``code``."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + code],
        env={name: value for name, value in os.environ.items() if name not in CHOICES} | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_glibc
def test_a_trim_hands_back_what_lies_between_tensors_and_leaves_those():
    code = """
from outsize.runtime.device.heap import resident_bytes
own_process()
set_thresholds(heap=True)
held = [torch.full([2**20], float(number)) for number in range(64)]
del held[1::2]
full = resident_bytes()
trim()
print(full - resident_bytes() >= 100 * 2**20, [float(tensor.sum()) / 2**20 for tensor in held] == list(range(0, 64, 2)))
"""
    assert said(code) == "True True"


@needs_glibc
def test_without_kernels_the_thresholds_are_set_all_the_same():
    assert said("own_process()\nprint(set_thresholds(heap=True))", OUTSIZE_NATIVE="0") == "True"


@needs_glibc
def test_threads_that_start_later_share_one_arena():
    assert said(f"own_process()\n{ARENAS}\nprint(arenas_of_a_thread())") == "1"


@needs_glibc
def test_a_command_uses_one_arena_before_its_first_thread():
    code = f"""
{ARENAS}
import outsize.cli.app as commands, outsize.cli
commands.app = lambda *arguments, **more: print(arenas_of_a_thread())
outsize.cli.main([])
"""
    assert said(code) == "1"


@needs_glibc
def test_in_a_process_of_the_user_the_heap_stays_as_it_is(tmp_path):
    code = f"""
{ARENAS}
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from outsize.runtime.device import heap
from outsize.training.run import train
from tiny import tiny_run
heap.keep_no_kernel_buffers = lambda: print("changed")
train(tiny_run(Path({str(tmp_path)!r})))
print(set_thresholds(heap=True), arenas_of_a_thread() > 1)
"""
    assert said(code).splitlines()[-1] == "False True"


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
    monkeypatch.setattr(heap, "resident_bytes", lambda: process.resident)
    monkeypatch.setattr(heap, "trim", process.trim)
    monkeypatch.setattr(heap, "LOOK_S", 0.0)
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
    monkeypatch.setattr(heap.time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(heap, "LOOK_S", 0.5)
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
    assert heap.resident_bytes() > 50 * MIB
    heap.trim()
