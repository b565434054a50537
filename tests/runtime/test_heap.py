"""The heaps of a process: tensors fit again where they have lain, and threads share one arena.

Settings of malloc hold for a process and for good, so each test asks a process of its own.
"""

import ctypes
import os
import subprocess
import sys

import pytest

from outsize import native
from patience import PATIENCE_S

needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library is not GNU's"
)
needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no kernels: {native.reason()}")

# What of the environment changes how torch and the C library take memory.
CHOICES = ("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_ARENA_MAX", "THP_MEM_ALLOC_ENABLE")
BEGIN = """
import ctypes, torch
from outsize import native
from outsize.runtime.device.heap import set_thresholds, trim, use_one_arena
"""
# Of nine tensors beside each other the fourth goes, and another one of its size comes.
AGAIN = """
def again(num_bytes):
    held = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(9)]
    place = held[4].data_ptr()
    held[4] = None
    come = torch.full([num_bytes], 7, dtype=torch.uint8)
    assert come.data_ptr() % 64 == 0
    assert int(come.sum(dtype=torch.int64)) == 7 * num_bytes
    return come.data_ptr() == place
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
@needs_kernels
@pytest.mark.parametrize("num_bytes", [2**17, 1_000_003, 2**21, 5_767_168, 2**24])
def test_a_tensor_fits_again_where_one_of_its_size_has_lain(num_bytes: int):
    asked = "native.call('use_tensor_heap', ctypes.c_size_t(2**25))"
    code = f"{AGAIN}\nset_thresholds(heap=True)\nprint(again({num_bytes}), {asked})"
    found, redirected = said(code).split()
    if redirected == "0":
        pytest.skip("this torch takes its memory otherwise")
    assert found == "True"


@needs_glibc
@needs_kernels
@pytest.mark.parametrize("num_bytes", [1, 2**10, 2**16 - 1, 2**20, 2**25, 2**26 + 1])
def test_tensors_of_other_sizes_are_aligned_as_before(num_bytes: int):
    """Smaller ones, and such as are mappings: of 1 MiB and more where the heap keeps nothing."""
    assert said(f"{AGAIN}\nset_thresholds(heap=False)\nagain({num_bytes})\nprint('aligned')") == "aligned"


@needs_glibc
@needs_kernels
def test_what_is_redirected_twice_and_freed_goes_back():
    """Memory goes back to where it came from; a trim leaves what is alive."""
    code = """
set_thresholds(heap=True)
set_thresholds(heap=False)
set_thresholds(heap=True)
held = [torch.full([2**20], float(number)) for number in range(8)]
del held[1::2]
trim()
grown = [tensor.resize_(2**21) for tensor in held]
print([float(tensor[2**20 - 1]) for tensor in grown])
"""
    assert said(code) == "[0.0, 2.0, 4.0, 6.0]"


@needs_glibc
@needs_kernels
def test_a_trim_hands_back_what_lies_between_tensors_and_leaves_those():
    code = """
from outsize.runtime.device.allocator import resident_bytes
set_thresholds(heap=True)
held = [torch.full([2**20], float(number)) for number in range(64)]
del held[1::2]
full = resident_bytes()
trim()
print(full - resident_bytes() >= 120 * 2**20, [float(tensor.sum()) / 2**20 for tensor in held] == list(range(0, 64, 2)))
"""
    assert said(code) == "True True"


@needs_glibc
@needs_kernels
def test_threads_take_and_free_tensors_of_any_size_at_once():
    """Each finds in its tensors what it wrote there, and nobody else, whatever comes and goes beside them."""
    code = """
import random, threading
set_thresholds(heap=True)
wrong = []
def turn(number):
    draw, held = random.Random(number), []
    for turn in range(2000):
        if len(held) > 20 or (held and draw.random() < 0.4):
            tensor, value = held.pop(draw.randrange(len(held)))
            if not bool((tensor == value).all()):
                wrong.append(number)
        value = number * 10_000 + turn
        held.append((torch.full([draw.choice([100, 2**14, 20_000, 2**16, 99_991])], float(value)), float(value)))
        if turn % 500 == 0:
            trim()
threads = [threading.Thread(target=turn, args=(number,)) for number in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(wrong)
"""
    assert said(code) == "[]"


@needs_glibc
@needs_kernels
@pytest.mark.parametrize("order", ["12", "21", "132", "312", "123"])
def test_tensors_that_lay_beside_each_other_leave_room_for_a_larger_one(order: str):
    code = f"""
set_thresholds(heap=True)
held = [torch.full([2**18], float(number)) for number in range(6)]
place = held[1].data_ptr()
for number in map(int, {order!r}):
    held[number] = None
larger = torch.empty({len(order)} * 2**18)
print(larger.data_ptr() == place, [float(tensor.mean()) for tensor in held if tensor is not None])
"""
    alive = [float(number) for number in range(6) if str(number) not in order]
    assert said(code) == f"True {alive}"


@needs_glibc
@needs_kernels
def test_a_process_that_was_forked_has_a_heap_of_its_own():
    """Whatever other threads are in the middle of when it is forked."""
    code = """
import os, threading
set_thresholds(heap=True)
held = torch.full([2**18], 1.0)
going = True
def churn():
    while going:
        [torch.empty(2**15) for _ in range(8)]
threads = [threading.Thread(target=churn) for _ in range(3)]
[thread.start() for thread in threads]
found = []
for _ in range(20):
    child = os.fork()
    if child == 0:
        more = held + 1.0
        os._exit(int(not (bool((held == 1.0).all()) and bool((more == 2.0).all()))))
    found.append(os.waitpid(child, 0)[1])
going = False
[thread.join() for thread in threads]
print(found == [0] * 20, float(held.sum()) == 2**18)
"""
    assert said(code) == "True True"


@needs_glibc
@needs_kernels
def test_where_addresses_are_short_none_are_reserved():
    """A limit such as of ``ulimit -v``: tensors lie in the heap of the C library, and the log says so."""
    code = """
import logging, resource
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=__import__("sys").stdout)
resource.setrlimit(resource.RLIMIT_AS, (2**40, resource.RLIM_INFINITY))
set_thresholds(heap=True)
print(float(torch.ones(2**20).sum()) == 2**20)
"""
    told, right = said(code).splitlines()
    assert "ulimit -v" in told or "posix_memalign" in told
    assert right == "True"


@needs_glibc
def test_without_kernels_the_thresholds_are_set_all_the_same():
    assert said("print(set_thresholds(heap=True))", OUTSIZE_NATIVE="0") == "True"


@needs_glibc
def test_threads_that_start_later_share_one_arena():
    assert said(f"use_one_arena()\n{ARENAS}\nprint(arenas_of_a_thread())") == "1"


@needs_glibc
def test_a_command_uses_one_arena_before_its_first_thread():
    code = f"""
{ARENAS}
import outsize.cli.app as commands, outsize.cli
commands.app = lambda *arguments, **more: print(arenas_of_a_thread())
outsize.cli.main([])
"""
    assert said(code) == "1"
