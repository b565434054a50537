"""Threads of OpenMP that help one thread compute are let go, and come back when they are needed."""

import subprocess
import sys

import pytest
import torch

from outsize.runtime.engine.executor import _libgomp, release_team

CODE = """
import os, time
import torch
from outsize.runtime.engine.executor import release_team

def num_threads(expected):
    for _ in range(600):  # those that have ended are counted for a moment more
        found = len(os.listdir("/proc/self/task"))
        if found == expected:
            break
        time.sleep(0.1)
    return found

first = len(os.listdir("/proc/self/task"))
numbers = torch.ones(2**20)
for _ in range(2):
    total = numbers.mul(2).sum().item()
    helped = len(os.listdir("/proc/self/task"))
    release_team()
    print(total == 2**21, helped - first, num_threads(first) - first, torch.get_num_threads())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads as Linux tells them")
def test_threads_go_and_come_back():
    if _libgomp() is None:
        pytest.skip("torch has another OpenMP than GNU's")
    done = subprocess.run(
        [sys.executable, "-c", "import os; os.environ['OMP_NUM_THREADS'] = '2'\n" + CODE],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True 1 0 2\n" * 2


def test_where_there_are_none_nothing_happens():
    release_team()
    release_team()


STALE = """
import ctypes
import torch
from outsize.runtime.engine.executor import release_team

library = ctypes.CDLL("libtorch_cpu.so")

@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def ask(_):
    found[library.omp_get_thread_num()] = library.MKL_Get_Max_Threads()

def numbers():
    library.GOMP_parallel(ask, None, 2, 0)
    return found

found = {}
torch.set_num_threads(2)
fresh = numbers()[1]
release_team()
torch.set_num_threads(fresh + 1)
torch.ones(2048, 2048).sum(0)
torch.set_num_threads(2)
print(numbers()[1] == fresh + 1)
release_team()
print(numbers()[1] == fresh)
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="MKL divides no products here")
def test_threads_come_back_without_the_number_that_they_had():
    if _libgomp() is None:
        pytest.skip("torch has another OpenMP than GNU's")
    done = subprocess.run([sys.executable, "-c", STALE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
