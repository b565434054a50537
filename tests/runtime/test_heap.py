"""The heap of a process: what is free is handed back, and threads share one arena.

Settings of malloc hold for a process and for good, so each test asks a process of its own.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
from outsize.runtime.device import allocator
from outsize.training.run import train
from tiny import tiny_run
allocator.keep_no_kernel_buffers = lambda: print("changed")
train(tiny_run(Path({str(tmp_path)!r})))
print(set_thresholds(heap=True), arenas_of_a_thread() > 1)
"""
    assert said(code).splitlines()[-1] == "False True"
