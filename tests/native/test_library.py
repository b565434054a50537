import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outsize import native
from outsize.native.kernel_sources import checksum
from outsize.native.library import LIBRARY, open_library
from patience import PATIENCE_S

CI = os.environ.get("CI")
needs_kernels = pytest.mark.skipif(not native.available(), reason=f"no kernels: {native.reason()}")


@pytest.mark.skipif(not CI, reason="only continuous integration promises that the kernels were built")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_where_there_is_a_compiler_the_kernels_were_built():
    assert native.available(), native.reason()


def test_the_build_finds_what_it_builds():
    """`make test` from a bare clone begins with it."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "setup.py", "--name"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["outsize"]), done.stderr


def ask(statement, **environ):
    code = f"from outsize import native; print(({statement}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_variable_turns_them_off():
    assert ask("native.available(), native.reason()", OUTSIZE_NATIVE="0") == (
        "(False, 'turned off by OUTSIZE_NATIVE=0')"
    )
    assert ask("native.available()", OUTSIZE_NATIVE="1") == str(native.available())


@needs_kernels
def test_there_is_a_reason_exactly_where_there_are_none():
    assert native.reason() is None
    assert native.level() in ("plain", "avx2", "avx512")


def test_without_the_library_the_reason_says_how_to_build_it(tmp_path):
    found = open_library(tmp_path / "libkernels.so.0")
    assert found.handle is None
    assert "was not built" in found.reason
    assert "setup.py build_ext --inplace" in found.reason


def test_what_is_no_library_is_a_reason_too(tmp_path):
    (tmp_path / "libkernels.so.0").write_text("not a library")
    found = open_library(tmp_path / "libkernels.so.0")
    assert found.handle is None
    assert "cannot be loaded" in found.reason


@needs_kernels
def test_a_library_built_from_other_sources_is_not_used(tmp_path):
    shutil.copy(LIBRARY, tmp_path)
    assert open_library(tmp_path / LIBRARY.name).handle is not None  # no sources to compare with
    (tmp_path / "other.c").write_text("int other;\n")
    assert "other sources" in open_library(tmp_path / LIBRARY.name).reason


def test_the_checksum_changes_with_every_file(tmp_path):
    sums = {checksum(tmp_path)}
    for name, text in (("a.c", "x"), ("a.c", "y"), ("b.h", "x")):
        (tmp_path / name).write_text(text)
        sums.add(checksum(tmp_path))
    (tmp_path / "notes.txt").write_text("no source")
    assert len(sums) == 4
    assert checksum(tmp_path) in sums


@needs_kernels
def test_a_lower_instruction_set_can_be_asked_for():
    best = native.level()
    try:
        assert native.use_level("plain") == native.level() == "plain"
    finally:
        assert native.use_level(best) == best
    with pytest.raises(ValueError, match="no instruction set 'sse2'; there is plain, avx2, avx512"):
        native.use_level("sse2")


@needs_kernels
def test_the_interpreter_is_free_while_a_kernel_runs():
    """ctypes.CDLL lets go of the lock; PyDLL would not."""
    assert not isinstance(native.library._load().handle, ctypes.PyDLL)


def test_the_sources_travel_with_the_package():
    """A wheel has them, so that a stale library is found out there as well."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"native/*.c", "native/*.h"' in project


THREADS = """
import os, sys, threading, time
import torch
from outsize.optim.split_masters import join_master, split_master

torch.set_num_threads(4)

def split(seed, into):
    master = torch.randn(100_000, generator=torch.Generator().manual_seed(seed))
    parts = torch.empty(100_000, dtype=torch.bfloat16), torch.empty(100_000, dtype=torch.int16)
    ties, joined = torch.empty(100_000 // 8, dtype=torch.uint8), torch.empty_like(master)
    for _ in range(10):
        split_master(master, *parts, ties)
        join_master(*parts, ties, joined)
    into[seed] = torch.equal(joined, master)

def num_threads(most=10**6):
    # A thread that has ended is counted for a moment more.
    ends_s = time.monotonic() + 30
    while (count := len(os.listdir('/proc/self/task'))) > most and time.monotonic() < ends_s:
        time.sleep(0.01)
    return count

def all_equal():
    found = {}
    callers = [threading.Thread(target=split, args=(seed, found)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return found == dict.fromkeys(range(4), True)
"""


def run_script(text):
    return subprocess.run(
        [sys.executable, "-c", THREADS + text], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout.split()


@needs_kernels
def test_ranges_of_several_callers_share_the_threads():
    # Three beside each caller at most, and none of them is started twice.
    before, equal, after, equal_again, later = run_script(
        "before = num_threads(); most = before + 4 * 3\n"
        "print(before, all_equal(), num_threads(most), all_equal(), num_threads(most))"
    )
    assert (equal, equal_again) == ("True", "True")
    assert int(before) < int(after) <= int(before) + 4 * 3
    assert int(later) <= int(before) + 4 * 3


@needs_kernels
def test_a_forked_process_has_threads_of_its_own():
    # The child calls nothing but kernels: torch's own threads do not outlive a fork.
    text = """
master, joined = torch.ones(100_000), torch.zeros(100_000)
parts = torch.empty(100_000, dtype=torch.bfloat16), torch.empty(100_000, dtype=torch.int16)
split_master(master, *parts, None)
child = os.fork()
if not child:
    join_master(*parts, None, joined)
    os._exit(0 if joined[-1:].view(torch.int32).numpy()[0] == 0x3F800000 else 1)
_, status = os.waitpid(child, 0)
print(status)
"""
    assert run_script(text) == ["0"]


@needs_kernels
@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) > 18, reason="nothing is nicer than this process")
def test_what_gives_way_is_helped_by_threads_that_do_so_too():
    """Else those that a checkpoint starts, at its niceness, would step the optimizer from then on."""
    # Kernels alone are called: torch starts threads of its own.
    text = """
master = torch.ones(300_000)
parts = torch.empty(300_000, dtype=torch.bfloat16), torch.empty(300_000, dtype=torch.int16)

def count(wanted):
    tasks = map(int, os.listdir('/proc/self/task'))
    return sum(os.getpriority(os.PRIO_PROCESS, task) == wanted for task in tasks)

def give_way():
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    split_master(master, *parts, None)
    done.set()
    counted.wait()

done, counted = threading.Event(), threading.Event()
threading.Thread(target=give_way).start()
done.wait()
own = os.getpriority(os.PRIO_PROCESS, os.getpid())
before = count(own)
split_master(master, *parts, None)
print(count(19), count(own) - before)
counted.set()
"""
    assert run_script(text) == ["4", "3"]  # one of which is the caller
