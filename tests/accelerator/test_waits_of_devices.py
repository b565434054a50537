"""What `Device` promises of order, on a device that tells what is out of order: see `native/order.h`."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from accelerator import late
from contracts import same_values
from contracts.device_contract import encode, normal
from devices import IS_MADE_UP
from outsize.accelerators import Devices
from outsize.codecs.codec import open_codec
from outsize.inference.loader import Caller
from outsize.planner.program.program import Kind, Op
from outsize.runtime.device import driver
from outsize.runtime.device.device import Accelerator, Device, open_device
from outsize.runtime.device.device_group import Workers, open_workers
from outsize.runtime.ops.activation_ops import ActivationOps
from outsize.runtime.ops.context import Microbatch, StepContext
from outsize.runtime.ops.link_codecs import bring_up
from outsize.storage.ledger import Arena
from outsize.storage.scratch import HostScratch

pytestmark = pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late")
SIZE = 4096


@pytest.fixture
def device() -> Iterator[Device]:
    device = open_device(Devices.parse("late:0"))
    yield device
    device.close()


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = open_workers(Devices.parse("late:0,1"))
    yield workers
    workers.close()


def host() -> torch.Tensor:
    return torch.ones(SIZE, dtype=torch.uint8).pin_memory()


def test_a_lane_may_use_what_was_allocated_at_once(device: Device):
    """The caller's stream may still be at work with what torch gives out again."""
    room = device.allocate(SIZE, "slot")
    with device.lane("up"):
        device.copy(room, host())
    torch.late.synchronize()
    assert late.offences() == []


def test_threads_that_enter_a_lane_at_once_share_its_stream(device: Device, monkeypatch: pytest.MonkeyPatch):
    """The second comes while the first makes the stream."""
    monkeypatch.setattr(driver, "_UNUSED", defaultdict(list))  # none is left from a run before
    make, entered = torch.late.Stream, []

    def enter() -> None:
        with device.behind("compute"):
            entered.append(torch.late.current_stream())

    def made(where: torch.device) -> torch.Stream:
        monkeypatch.setattr(torch.late, "Stream", make)
        second = threading.Thread(target=enter)
        second.start()
        second.join()
        return make(where)

    monkeypatch.setattr(torch.late, "Stream", made)
    enter()
    assert len(entered) == 2
    assert entered[0].stream_id == entered[1].stream_id
    assert len(driver._UNUSED[device.torch_device, "compute"]) == 1  # what the first has made for nothing


def test_memory_is_given_back_when_lanes_are_done_with_it(device: Device):
    room, source = device.allocate(SIZE, "slot"), host()
    with device.lane("up"):
        device.copy(room, source)
    del room
    device.close()
    assert late.offences() == []


def test_a_lane_waits_for_a_mark_of_another(device: Device):
    room, back = device.allocate(SIZE, "slot"), torch.zeros(SIZE, dtype=torch.uint8).pin_memory()
    with device.lane("up"):
        device.copy(room, host())
        mark = device.record("up")
    with device.lane("down"):
        device.wait("down", mark)
        device.copy(back, room)
        mark = device.record("down")
    device.wait("host", mark)
    assert back.eq(1).all()
    assert late.offences() == []


@pytest.mark.parametrize("held", [True, False])
def test_what_a_lane_still_reads_is_held_for_it(held: bool, device: Device):
    with device.lane("up"):
        made = torch.ones(SIZE, device="late:0")
        mark = device.record("up")
    with device.lane("compute"):
        device.wait("compute", mark)
        made.sum()
    if held:
        device.hold(made, "compute")
    del made
    torch.late.synchronize()
    assert len(late.offences()) == (not held)


def test_a_mark_has_a_time_on_the_host_s_clock(device: Device):
    """No earlier than the work that the mark stands behind: the clock begins with a mark that had passed."""
    began = time.perf_counter()
    with device.lane("compute"):
        torch.ones(SIZE, device="late:0")
        mark = device.record("compute")
    torch.late.synchronize()
    assert device.seconds(mark) >= began


def test_lanes_of_workers_enter_streams_of_all_devices_they_touch(workers: Workers):
    """What arrives by a lane between two is marked there, and what computes there finds it."""
    with workers.lane("compute:w0"):
        sent = torch.ones(SIZE, device="late:0")
        mark = workers.record("compute:w0")
    with workers.lane("peer:w0-w1"):
        workers.wait("peer:w0-w1", mark)
        arrived = torch.empty(SIZE, device="late:1")
        arrived.copy_(sent, non_blocking=True)
        workers.hold(sent, "peer:w0-w1")
        workers.hold(arrived, "compute:w1")
        mark = workers.record("peer:w0-w1")
    del sent
    with workers.lane("compute:w1"):
        workers.wait("compute:w1", mark)
        arrived += 1
        mark = workers.record("compute:w1")
    del arrived
    workers.wait("", mark)
    assert late.offences() == []


def test_a_loss_is_read_behind_the_lane_that_computed_it(device: Device):
    """Whoever reads: a lane of another device reads on a stream that has waited for nothing."""
    context = StepContext(0, 1e-3, (Microbatch({}, 1.0, 1),))
    with device.lane("compute:w0"):
        context.losses[0] = torch.ones((), device="late:0")
        context.loss_marks[0] = device.record("compute:w0")
    assert context.loss() == 1.0
    assert late.offences() == []


def test_a_lane_that_computes_touches_other_devices_in_their_order(workers: Workers):
    with workers.lane("compute:w1"):
        there = torch.ones(SIZE, device="late:1")
    with workers.lane("compute:w0"):
        there.sum()
        del there
    torch.late.synchronize()
    assert late.offences() == []


def test_a_lane_brings_down_what_its_worker_has_made_on_another_device(workers: Workers):
    back = torch.zeros(SIZE).pin_memory()
    with workers.lane("compute:w1"):
        made = torch.ones(SIZE, device="late:1").to("late:0", non_blocking=True)
        mark = workers.record("compute:w1")
    with workers.lane("down:w1"):
        workers.wait("down:w1", mark)
        back.copy_(made, non_blocking=True)
    torch.late.synchronize()
    assert late.offences() == []


def test_what_a_lane_has_made_is_the_caller_s_when_taken():
    device, caller = open_device(Devices.parse("late:0")), Caller(torch.device("late:0"))
    with device.lane("compute"):
        made = torch.ones(SIZE, device="late:0")
        mark = device.record("compute")
    caller.wait(mark)
    caller.take(made)
    made.sum()
    del made
    device.close()
    assert late.offences() == []


def test_what_the_caller_has_enqueued_is_done_when_finished(device: Device):
    caller, source = Caller(torch.device("late:0")), host()
    there = source.to("late:0", non_blocking=True)
    caller.finish()
    with device.lane("compute"):
        there.sum()
    torch.late.synchronize()
    assert late.offences() == []


def test_what_the_caller_has_enqueued_on_any_device_is_done_when_finished(workers: Workers):
    caller = Caller(torch.device("late:0"), torch.device("late:1"))
    there = host().to("late:1", non_blocking=True)
    caller.finish()
    with workers.lane("compute:w1"):
        there.sum()
        caller.take(there)
    torch.late.synchronize("late:1")
    assert late.offences() == []


def test_what_lies_on_the_other_worker_s_device_already_is_handed_over_as_it_is(workers: Workers):
    """Another worker's lane would copy it there once more, in no order with what made it, and empty it."""
    with workers.lane("compute:w1"):
        there = torch.ones(SIZE, device="late:1")
    handing = ActivationOps(workers.devices[0], HostScratch(1, SIZE, Arena()), devices=workers.devices)
    run = _Handed(there.untyped_storage())
    with workers.lane("peer:w0-w1"):
        context = SimpleNamespace(runs={0: run}, number=0)
        handing.pass_on(
            Op(kind=Kind.PASS, unit=0, microbatch=0, worker=0, target=1), cast(StepContext, context)
        )
    torch.late.synchronize("late:1")
    assert run.storages[0] is run.given
    assert there.sum() == SIZE
    assert late.offences() == []


class _Handed:
    """What a hand-over asks of a run whose input is one storage."""

    def __init__(self, given: torch.UntypedStorage):
        self.given, self.storages = given, []

    def input_storages(self, unit: int) -> list[torch.UntypedStorage]:
        return [self.given]

    def replace_input(self, unit: int, storages: list[torch.UntypedStorage]) -> None:
        self.storages = storages


def test_pieces_are_decoded_beside_the_copies_of_the_next_ones(
    device: Device, monkeypatch: pytest.MonkeyPatch
):
    """Two buffers by turns: a copy waits for the decoding of what its buffer held before, and for no other."""
    monkeypatch.setattr("outsize.runtime.ops.link_codecs.PIECE_ELEMENTS", 2048)
    codec, source = open_codec("lossless4"), normal(13 * 1024, torch.bfloat16)
    pieces = [encode(codec, piece).pin_memory() for piece in source.split(2048)]
    staging = [device.allocate(2 * codec.spec.max_bytes(2048, "bf16"), "codec staging") for _ in range(2)]
    plane = device.allocate(source.nbytes, "slot").view(torch.bfloat16)
    with device.lane("up"):
        assert bring_up(device, codec, pieces, plane, staging) == sum(piece.numel() for piece in pieces)
        arrived = plane.cpu()
    assert same_values(arrived, source)
    assert late.offences() == []
    with device.lane("up"), late.held_up(cast(Accelerator, device)._streams.of("decode")):
        device.beside(device.here(), lambda: staging[1].fill_(1))
        staging[0].zero_()
        assert staging[0].cpu().sum() == 0  # the lane goes on
