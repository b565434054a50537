"""What every test is held to: it leaves no thread and no open file behind."""

import atexit
import functools
import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from outsize.storage.directory import directory_of_process
from patience import THREAD_PATIENCE_S

# Before torch is imported. Tiny models gain nothing from more threads; tests that want them say so.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # others outlive what is compiled
os.environ.setdefault(
    "HF_HUB_DISABLE_TELEMETRY", "1"
)  # its thread outlives a test, and no test tells anyone outside

# What is counted of models is kept for the whole run, and not where the user keeps it. Workers inherit the place.
if "XDG_CACHE_HOME" not in os.environ or "OUTSIZE_TESTS" not in os.environ:
    # But the made-up device, which takes a minute to build, is kept for the user: see tests/accelerator/build.py.
    if os.access(Path.home(), os.W_OK):
        os.environ.setdefault("LATE_CACHE", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))
    kept = tempfile.mkdtemp(prefix="outsize-tests-")
    os.environ.update(XDG_CACHE_HOME=kept, OUTSIZE_TESTS="1")
    atexit.register(shutil.rmtree, kept, ignore_errors=True)

# The same examples every time, so that a change is judged by itself; `make explore` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("repeatable")

# Opened on first use by libraries, kept for the life of the process: shared objects, random bytes, devices.
LIBRARY_FILES = (".so", "/dev/urandom", "/dev/null", "/dev/nvidia")

# Tests of what is on a disk when the power goes; a disk takes milliseconds for each file of a checkpoint.
SYNCS = {"crash", "storage", "gpu", "test_crash_safety.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the tests be run on other processors than the machine's."""
    parser.addoption(
        "--products", choices=("by-shape", "exact"), help="how products round: see tests/processors.py"
    )
    parser.addoption(
        "--accelerator",
        choices=("late",),
        help="run what needs an accelerator on one that is made up: see docs/testing.md",
    )
    parser.addoption(
        "--lateness", default="late-copies", help="what of it is late: see tests/accelerator/late.py"
    )
    parser.addoption("--late-seed", type=int, default=1, help="how late, by these random numbers")


def pytest_configure(config: pytest.Config) -> None:
    """Become such a processor, or have such a device, for all of this process."""
    if config.getoption("products"):
        from processors import compute_as

        compute_as(config.getoption("products"))
    if config.getoption("accelerator"):
        make_up_an_accelerator()


def make_up_an_accelerator() -> None:
    """Have a device called ``late``; where one cannot be built, leave without a test unless one must be."""
    from accelerator import build, late

    why = build.missing()
    if why is None:
        late.install()
    elif os.environ.get("CI"):
        pytest.exit(why, returncode=1)
    else:
        pytest.exit(f"skipped: {why}", returncode=0)


def open_files() -> dict[str, str]:
    """Return the open file descriptors of this process that tests answer for, with what they point to."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # the descriptor that lists the directory
            continue
        if not any(part in target for part in LIBRARY_FILES):
            found[descriptor.name] = target
    return found


@functools.cache
def open_context() -> None:
    """Have a GPU's driver open what it keeps for the life of the process: pipes and events of its own."""
    import torch

    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")


def live_threads() -> set[threading.Thread]:
    """Return the Python threads of this process that tests answer for."""
    # A native thread that has run Python (autograd of a CUDA device) shows as a dummy; tqdm keeps a monitor.
    return {
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread) and not type(thread).__module__.startswith("tqdm")
    }


@pytest.fixture(autouse=True)
def same_numbers_in_any_order() -> None:
    """Draw random tensors that do not depend on the tests that ran before."""
    import torch

    # torch.manual_seed keeps a stack trace for each kind of device that there is not, in every test.
    seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a Python thread running or a file open."""
    directory_of_process()  # one for all tests, locked while the process runs
    open_context()
    threads_before, files_before = live_threads(), open_files()
    yield
    leaked_threads = live_threads() - threads_before
    ends_at = time.monotonic() + THREAD_PATIENCE_S  # of all of them
    for thread in leaked_threads:
        thread.join(max(0.0, ends_at - time.monotonic()))
    running = sorted(thread.name for thread in leaked_threads if thread.is_alive())
    assert not running, f"threads left running: {running}"
    if leaked_files(files_before):
        gc.collect()  # a reference cycle is not a leak
    assert not leaked_files(files_before), f"files left open: {leaked_files(files_before)}"


def leaked_files(before: dict[str, str]) -> list[str]:
    """Return what is open now and was not open ``before``."""
    return sorted(target for descriptor, target in open_files().items() if before.get(descriptor) != target)


@pytest.fixture(autouse=True)
def a_whole_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a made-up accelerator, fail a test that corrupts data on a real one; leave no broken device behind."""
    if not request.config.getoption("accelerator"):
        yield
        return
    from accelerator import late
    from outsize import files

    late.set_profile(request.config.getoption("lateness"), request.config.getoption("late_seed"))
    with files.replaced(late.WatchedFiles()):
        yield
    late.heal()
    assert late.offences() == []


@pytest.fixture(autouse=True)
def no_waits_for_the_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync nothing, which no test without a loss of power can see, but where syncs and their errors are the subject."""
    if not SYNCS & set(request.path.relative_to(Path(__file__).parent).parts):
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, lambda descriptor: os.fstat(descriptor) and None)


@pytest.fixture(autouse=True)
def no_configuration_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the environment variables of whoever runs the tests."""
    for name in os.environ:
        if name.startswith("OUTSIZE_"):
            monkeypatch.delenv(name)
