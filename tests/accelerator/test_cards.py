"""What cards have: drivers that pin little, or slowly, launches that cost, memory that nobody tells, picky products."""

import gc
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerator import late
from devices import IS_MADE_UP
from outsize.accelerators import Devices
from outsize.codecs.codec import open_codec
from outsize.data.batch import Batch
from outsize.hardware.cards import parse_gpus
from outsize.hardware.machine_spec import Figure, Link
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS
from outsize.session.decide import lane_rates
from outsize.session.session import Session
from outsize.storage.ledger import Arena
from outsize.training import run
from outsize.training.run import train
from support import assert_same_end, in_dir, make_run

pytestmark = [
    pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late"),
    pytest.mark.filterwarnings("ignore"),
]
PAGE = 4096
LATE: dict[str, Any] = {"device": "late:0", "home": "host"}


@pytest.mark.parametrize("limit", [PAGE, 40 * PAGE])
def test_a_driver_that_pins_little_costs_time_alone(
    limit: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """As WSL2's does: what is refused is said with its sum, and batches are not pinned either, nor tried again."""
    config = make_run(tmp_path, memory=LATE, train={"steps": 3})
    refused, said, pin = [], [], Batch.pinned

    def watched(batch: Batch) -> Batch:
        try:
            return pin(batch)
        except RuntimeError:
            refused.append(batch)
            raise

    monkeypatch.setattr(Batch, "pinned", watched)
    train(in_dir(config, tmp_path / "all"))
    gc.collect()  # what tests before have left pinned would be room later
    limit += late.native().pinned_bytes()  # what torch keeps for batches
    start = run.start

    def pinning_little(*args: Any) -> Any:  # behind the forecast, which pins and gives back
        late.set_pinning(limit)
        return start(*args)

    monkeypatch.setattr(run, "start", pinning_little)
    with caplog.at_level(logging.WARNING):
        train(in_dir(config, tmp_path / "little"), announce=said.append)
    # Not said where pageable copies were measured no slower, which this machine decides.
    assert sum("tokens/s are expected, not" in line for line in said) <= 1
    assert_same_end(tmp_path / "all", tmp_path / "little")
    assert late.native().pinned_bytes() <= limit
    told = [record.getMessage() for record in caplog.records if "pageable" in record.getMessage()]
    (of_home,) = [line for line in told if "weights and gradients at home stay pageable" in line]
    assert "copies to the GPU will be slower: cudaHostRegister returned error 2" in of_home
    assert len(told) <= 4  # one for each purpose
    assert len(refused) <= 1
    beats = (tmp_path / "little" / "heartbeat.jsonl").read_text().splitlines()
    assert json.loads(beats[-1])["fallbacks"]["pageable"] > 0


def test_a_forecast_goes_by_what_was_pinned_and_by_pageable_copies_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
):
    """Figures by hand: a quarter at 50 GB/s and the rest at 10 is 12.5 GB/s; XPU pins nothing."""
    device, effort = Devices.parse("late:0"), replace(lane_rates.SHORT, copy_bytes_max=2**20)
    late.set_pinning(PAGE + late.native().pinned_bytes())
    assert lane_rates._copies(device, effort, "pinned") is None
    figures = lane_rates._copies(device, effort, "pageable")
    assert figures is not None
    assert {figure.source for figure in figures} == {"pageable copies"}
    rates = {"pinned": (50e9, 40e9, 1e-5), "pageable": (10e9, 20e9, 1e-5)}

    def copies(device: Devices, effort: Any, path: str) -> list[Figure]:
        return [Figure(value=each, source=f"{path} copies", measured=True) for each in rates[path]]

    monkeypatch.setattr(lane_rates, "_copies", copies)
    for path, up, down in (("pinned", 12.5e9, 160e9 / 7), ("pageable", 10e9, 20e9)):
        one, other, latency = copies(device, effort, path)
        link = Link(up_bytes_per_s=one, down_bytes_per_s=other, latency_s=latency)
        machine = lane_rates.partly_pinned(replace(parse_gpus("4090"), links=(link,)), device, 0.25)
        assert machine.links[0].up_bytes_per_s.value == pytest.approx(up)
        assert machine.links[0].down_bytes_per_s.value == pytest.approx(down)


def test_masters_and_moments_are_not_pinned_and_buffers_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of 16 bytes a parameter of a bf16 model with separate masters, 4 to 6 cross."""
    pinned: list[int] = []
    of_home: list[int] = []
    opened: list[Session] = []
    of_session, of_arena = Session.open_engine, Arena.pin

    def open_engine(session: Session, *args: Any, **named: Any) -> Any:
        opened.append(session)
        return of_session(session, *args, **named)

    def pin(arena: Arena, tensors: Any, what: str) -> None:
        before = late.native().pinned_bytes()
        of_arena(arena, tensors, what)
        pinned.append(before)
        of_home.append(late.native().pinned_bytes() - before)

    monkeypatch.setattr(Session, "open_engine", open_engine)
    monkeypatch.setattr(Arena, "pin", pin)
    model, optimizer = {"dtype": "bf16"}, {"masters": "separate"}
    train(make_run(tmp_path, memory=LATE, train={"steps": 1}, model=model, optimizer=optimizer))
    layout = opened[0].home._layout
    crossing = [each for (_, plane), each in layout.extents.items() if plane in (WEIGHTS, GRADIENT)]
    assert sum(of_home) == sum(each.num_bytes for each in crossing) < layout.num_bytes / 2
    assert pinned[0] > 0


def test_pinning_may_take_time():
    late.set_pinning(0, bytes_per_s=10e6)
    memory = torch.empty(2**20, dtype=torch.uint8)
    began = time.perf_counter()
    assert late.native().register(memory.data_ptr(), memory.nbytes) == 0
    assert time.perf_counter() - began >= 0.1
    late.native().unregister(memory.data_ptr())


def test_what_a_launch_costs_is_in_what_is_measured_of_codecs():
    """A forecast goes by it: a codec of many kernels is slow on a GPU, whatever its bytes."""
    codec, sample = open_codec("int8"), torch.randn(2**14).to(torch.bfloat16)
    before = late.native().statistics()["kernels"]
    lane_rates._rates_of(codec, sample, "cpu", "late:0")
    kernels = (late.native().statistics()["kernels"] - before) / (1 + lane_rates.REPEATS)
    assert kernels >= 1
    late.set_launch_us(20_000)
    rates = lane_rates._rates_of(codec, sample, "cpu", "late:0")
    assert sample.nbytes / rates.decode_bytes_per_s >= int(kernels) * 0.02


@pytest.mark.parametrize("lacks", ["a driver that says what is free", "memory of its own"])
def test_memory_that_is_not_told_or_is_the_host_s(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Intel's desktop GPUs raise; GB10 and graphics within a CPU have the RAM."""

    def raises(index: int) -> tuple[int, int]:
        raise RuntimeError("The device doesn't support querying the available free memory")

    if lacks == "memory of its own":
        monkeypatch.setattr(late._Properties, "is_integrated", True, raising=False)
    else:
        monkeypatch.setattr(torch.get_device_module("late"), "mem_get_info", raises)
    free = {"device_memory": None, "host_memory": None}
    config = make_run(tmp_path, memory=LATE, train={"steps": 2})
    train(in_dir(config, tmp_path / "told"))
    train(in_dir(make_run(tmp_path, memory={**LATE, **free}, train={"steps": 2}), tmp_path / "free"))
    assert_same_end(tmp_path / "told", tmp_path / "free")


def test_products_round_by_where_a_matrix_begins():
    """As cuBLAS's do, whose kernels go by alignment: slots lay weights where a model of its own has them."""
    memory = torch.randn(64 * 64 + 64, device="late:0")
    matrix = memory[:4096].view(64, 64)
    found = []
    for start in (0, 64, 32):
        moved = torch.empty_like(memory)[start : start + 4096].view(64, 64).copy_(matrix)
        found.append((moved @ matrix).cpu())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
