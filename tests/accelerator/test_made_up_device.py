"""The made-up accelerator does what it is for: what is wrong on a real device goes wrong on it, each time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelerator import late
from devices import IS_MADE_UP

pytestmark = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")


def delay(kernels: int) -> None:
    late.native().set_lateness(0, kernels, 1, 1)


def pinned(num: int = 256, value: float = 1.0) -> torch.Tensor:
    return torch.full((num,), value).pin_memory()


def test_memory_is_out_of_the_host_s_reach():
    code = (
        "from accelerator import late; late.install(); import torch, ctypes\n"
        "x = torch.ones(4, device='late:0'); torch.late.synchronize(); print('here', flush=True)\n"
        "ctypes.string_at(x.data_ptr(), 1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=child_environment()
    )
    assert done.stdout == "here\n"
    assert done.returncode == -11


def child_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_missing_wait_shows():
    """What another stream reads before the copy is what the allocator left there."""
    copies, computes = torch.late.Stream("late:0"), torch.late.Stream("late:0")
    host, arrived = pinned(), torch.late.Event()
    with torch.late.stream(copies):
        there = torch.empty(256, device="late:0")
    copies.synchronize()
    with late.held_up(copies):
        with torch.late.stream(copies):
            there.copy_(host, non_blocking=True)
            arrived.record(copies)
        with torch.late.stream(computes):
            early = there.clone()
            computes.synchronize()
            computes.wait_event(arrived)
            after = there.clone()
        assert not arrived.query()
    torch.late.synchronize()
    assert early.cpu().isnan().all()
    assert torch.equal(after.cpu(), host)
    (told,) = late.offences()
    assert "a copy on the device" in told
    assert "does not wait for a copy up" in told


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_freed_is_poisoned_unless_other_streams_are_recorded(recorded: bool):
    maker, reader = torch.late.Stream("late:0"), torch.late.Stream("late:0")
    with torch.late.stream(maker):
        tensor = torch.ones(1024, device="late:0")
    maker.synchronize()
    host = pinned(1024, 2.0)
    with late.held_up(reader):
        with torch.late.stream(reader):
            host.copy_(tensor, non_blocking=True)
        if recorded:
            tensor.record_stream(reader)
        del tensor
        maker.synchronize()
    reader.synchronize()
    assert host.eq(1).all() if recorded else host.isnan().all()
    told = late.offences()
    assert len(told) == (not recorded)
    assert all("was freed while in use by a copy down" in each for each in told)


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_out_of_order_is_an_offence_even_if_nothing_is_late(waits: bool):
    """On the device, and in the host memory that both copies touch."""
    late.set_profile("prompt")
    one, other, arrived = torch.late.Stream("late:0"), torch.late.Stream("late:0"), torch.late.Event()
    host = pinned()
    with torch.late.stream(one):
        there = host.to("late:0", non_blocking=True)
        arrived.record(one)
    if waits:
        other.wait_event(arrived)
    with torch.late.stream(other):
        host.copy_(there, non_blocking=True)
    torch.late.synchronize()
    assert len(late.offences()) == (0 if waits else 2)


def test_operators_that_have_names_of_their_own_on_devices_compute_what_the_cpu_does():
    """Convolutions, and copies of numbers that a flag conjugates."""

    def found_on(device: str) -> list[torch.Tensor]:
        x = torch.arange(24.0).view(1, 4, 6).to(device).requires_grad_()
        weight, bias = torch.ones(4, 1, 3, device=device, requires_grad=True), torch.ones(4, device=device)
        turned = torch.view_as_complex(x.view(1, 4, 3, 2)) * torch.polar(x[0, :, :3], x[0, :, 3:])
        y = torch.nn.functional.conv1d(x, weight, bias.requires_grad_(), groups=4)
        (y.square().sum() + torch.view_as_real(turned).sum()).backward()
        found = (y, turned, turned.conj(), x.grad, weight.grad, bias.grad)
        return [value.detach().cpu() for value in found if value is not None]

    assert all(map(torch.equal, found_on("late:0"), found_on("cpu")))


@pytest.mark.parametrize("waits", [True, False])
def test_a_file_that_is_read_into_what_a_copy_still_reads_is_an_offence(waits: bool, tmp_path: Path):
    """And one that is written from what a copy still writes."""
    late.set_profile("prompt")
    host, stream = pinned(), torch.late.Stream("late:0")
    bytes_of_it = memoryview(host.numpy()).cast("B")
    path = tmp_path / "file"
    path.write_bytes(bytes(len(bytes_of_it)))
    with torch.late.stream(stream), path.open("r+b") as file:
        there = host.to("late:0", non_blocking=True)
        if waits:
            stream.synchronize()
        late.WatchedFiles().pread(file.fileno(), bytes_of_it, 0)
        host.copy_(there, non_blocking=True)
        if waits:
            stream.synchronize()
        late.WatchedFiles().pwrite(file.fileno(), bytes_of_it, 0)
        torch.late.synchronize()
    assert len(late.offences()) == (0 if waits else 2)


def test_memory_runs_out_at_its_limit():
    torch.late.synchronize()
    late.set_limit(0, torch.late.memory_allocated("late:0") + 2**20)
    kept = torch.empty(2**19, dtype=torch.uint8, device="late:0")
    with pytest.raises(torch.OutOfMemoryError, match="late out of memory"):
        torch.empty(2**20, dtype=torch.uint8, device="late:0")
    del kept
    assert torch.empty(2**20, dtype=torch.uint8, device="late:0").numel() == 2**20


def test_an_allocation_may_be_refused_by_number():
    late.strike(0, "allocation", after=1)
    first = torch.empty(8, device="late:0")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(8, device="late:0")
    assert first.numel() == torch.empty(8, device="late:0").numel()


def test_an_error_of_a_kernel_surfaces_late_and_stays():
    x = torch.ones(8, device="late:0")
    torch.late.synchronize()
    late.strike(0, "kernel", after=0)
    with late.held_up(torch.late.current_stream("late:0")):
        y = x + 1  # returns
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError, match="device-side assertion"):
            torch.late.synchronize()
    with pytest.raises(torch.AcceleratorError, match="device-side assertion"):
        y.cpu()
    assert torch.ones(2, device="late:1").sum().item() == 2  # the other device is whole
    assert late.heal()
    assert x.sum().item() == 8


def test_a_lost_device_answers_every_call_with_an_error():
    x = torch.ones(8, device="late:0")
    event = torch.late.Event()
    torch.late.synchronize("late:0")
    late.strike(0, "loss", after=0)
    with late.held_up(torch.late.current_stream("late:0")):
        torch.add(x, 1)  # returns
    with pytest.raises(torch.AcceleratorError, match="the device is lost"):
        torch.late.synchronize("late:0")
    for call in (lambda: x + 1, x.cpu, lambda: torch.empty(8, device="late:0"), lambda: event.record()):
        with pytest.raises(torch.AcceleratorError, match="the device is lost"):
            call()
    late.heal()


def test_memory_that_is_unpinned_in_flight_is_an_offence():
    host = torch.zeros(4096 * 4, dtype=torch.uint8)
    stream = torch.late.Stream("late:0")
    with torch.late.stream(stream):
        there = torch.empty_like(host, device="late:0")
    assert late.native().register(host.data_ptr(), host.nbytes) == 0
    assert late.native().register(host.data_ptr() + 8, 8) == 712
    with late.held_up(stream):
        with torch.late.stream(stream):
            there.copy_(host, non_blocking=True)
        late.native().unregister(host.data_ptr())
    torch.late.synchronize()
    assert late.offences() == ["memory was unpinned while a copy was in flight"]
    assert late.native().unregister(host.data_ptr()) == 713


def test_random_numbers_repeat_whatever_is_late():
    drawn = []
    for kernels in (0, 20_000):
        delay(kernels=kernels)
        torch.late.manual_seed(7)
        drawn.append(torch.rand(64, device="late:0").cpu())
        state = torch.late.get_rng_state()
        more = torch.rand(8, device="late:0").cpu()
        torch.late.set_rng_state(state)
        assert torch.equal(torch.rand(8, device="late:0").cpu(), more)
    assert torch.equal(*drawn)


def test_events_are_timed_and_asleep():
    stream = torch.late.Stream("late:0")
    begin, end = (torch.late.Event(enable_timing=True, blocking=True) for _ in range(2))
    begin.record(stream)
    with torch.late.stream(stream):
        torch.ones(1024, device="late:0").mul_(2)
    end.record(stream)
    end.synchronize()
    assert begin.elapsed_time(end) > 0
    assert end.query()


def test_autocast_lowers_products():
    a = torch.ones(4, 4, device="late:0")
    with torch.autocast("late", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        assert torch.softmax(a, 0).dtype == torch.float32


def test_devices_do_not_compute_together():
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device="late:0") + torch.ones(2, device="late:1")
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.ones(2, device="late:0") + torch.ones(2)


def test_copies_between_devices_keep_the_order_of_both():
    delay(kernels=20_000)
    x = torch.zeros(256, device="late:0")
    for number in range(4):
        x.fill_(number)
        y = x.to("late:1", non_blocking=True)
        x.fill_(-1)
        assert y.cpu().eq(number).all()


def test_peer_access_may_be_denied():
    assert late.reaches(0, 1)
    with late.no_peer_access():
        assert not late.reaches(0, 1)
    assert late.reaches(1, 0)


def test_a_shape_that_depends_on_values_waits():
    delay(kernels=20_000)
    x = torch.zeros(16, device="late:0")
    x[3] = 1
    assert torch.nonzero(x).cpu().tolist() == [[3]]
    assert x[x > 0].cpu().tolist() == [1.0]
