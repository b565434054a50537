import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outsize.config import Config
from outsize.errors import ConfigError, ModelError
from outsize.hardware.cards import parse_gpus
from outsize.hardware.machine_spec import Figure
from outsize.planner.predict import question
from outsize.planner.program.program import Kind
from outsize.planner.program.stages import Extent
from outsize.planner.simulate.costs import UnitTimes
from outsize.session.decide import decide as module
from outsize.session.decide.rates import Rates
from outsize.session.job.prepare import Job, prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import foresee
from outsize.training.run import TrainResult, train
from support import make_run

LINKED: dict[str, Any] = {"device": "emulated", "link_gb_per_s": 100.0, "resident": "none"}


def on_a_link(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, host_flops_per_s: float | None = None
) -> None:
    """Units take a millisecond forward and three backward, a third of it to recompute; the optimizer nothing.

    Of the recompute of a block 0.9 ms are attention: products of so small a model are not worth a byte.
    """
    machine = parse_gpus("4090")
    rate = Figure(value=bytes_per_s, source="test")
    free = Figure(value=1e-9, source="test")
    if host_flops_per_s is not None:
        products = Figure(value=host_flops_per_s, source="test")
        machine = replace(machine, host=replace(machine.host, flops_per_s=products))
    link = replace(machine.links[0], up_bytes_per_s=rate, down_bytes_per_s=rate, latency_s=free)

    def measure_rates(prepared: Job, _: Path) -> Rates:
        count = prepared.split.spec.num_streamed
        spared_s = {Extent.ATTENTION: (0.0, *[9e-4] * (count - 2), 0.0)}
        times = UnitTimes(forward_s=(1e-3,) * count, backward_s=(3e-3,) * count, spared_s=spared_s)
        workers = prepared.machine.num_workers
        here = replace(machine, gpus=machine.gpus * workers, links=(link,) * workers)
        return Rates(here, times, microbatches=prepared.config.microbatches)

    monkeypatch.setattr(module, "measure_rates", measure_rates)


def tight(tmp_path: Path, **memory: Any) -> Config:
    """A run whose device holds inputs and little more."""
    sections: dict[str, Any] = {"train": {"microbatches": 4, "steps": 2}}
    kept = {name: {**LINKED, "activations": name} for name in ("recompute", "keep")}
    sizes = [
        prepare(
            RunSpec.of(make_run(tmp_path, memory=each, **sections), tmp_path), lambda _: None
        ).plan.total_bytes("device")
        for each in kept.values()
    ]
    budget = sizes[0] + (sizes[1] - sizes[0]) // 4
    return make_run(tmp_path, memory={**LINKED, "device_memory": budget, **memory}, **sections)


def chosen(tmp_path: Path, **memory: Any) -> tuple[set[Kind], list[str]]:
    said: list[str] = []
    prepared = prepare(RunSpec.of(tight(tmp_path, **memory), tmp_path), lambda _: None)
    found, _ = module.choose_plan(prepared, said.append)
    return {op.kind for op in found.plan.program}, said


def test_a_fast_link_carries_what_would_be_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on_a_link(monkeypatch, 1e12)
    kinds, said = chosen(tmp_path)
    assert {Kind.OFFLOAD, Kind.ONLOAD} <= kinds
    assert said[0].startswith("memory.activations: auto offloads: a step is predicted to take ")


@pytest.mark.parametrize(("bytes_per_s", "stays"), [(1e6, True), (1e12, False)])
def test_units_stay_with_their_state_unasked_where_the_link_is_slow_and_end_with_the_same_bits(
    bytes_per_s: float, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    on_a_link(monkeypatch, bytes_per_s)
    memory = {**LINKED, "resident": "auto", "device_memory": "1GiB"}
    config = make_run(tmp_path, memory=memory, train={"microbatches": 2, "steps": 2})
    said: list[str] = []
    found = train(config, announce=said.append)
    line = "memory.resident: auto keeps 6 of 6 units that train on the device with their state: a step is predicted"
    assert any(each.startswith(line) for each in said) == stays
    again = config.train.model_copy(update={"run_dir": str(tmp_path / "again")})
    memory_none = config.memory.model_copy(update={"resident": "none"})
    none = train(config.model_copy(update={"memory": memory_none, "train": again}))
    assert losses(found) == losses(none)


@pytest.mark.parametrize(("bytes_per_s", "leaves"), [(1e12, True), (1e6, False)])
def test_several_workers_offload_what_their_links_carry(
    bytes_per_s: float, leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    on_a_link(monkeypatch, bytes_per_s)
    monkeypatch.setattr(question, "LEAST_SELECTED_S", 0.0)  # of a model this small nothing is worth it
    memory = {**LINKED, "device": "emulated:2"}
    config = make_run(tmp_path, memory=memory, train={"microbatches": 4, "steps": 2})
    plan, _, *_ = foresee(config)
    assert (Kind.OFFLOAD in {op.kind for op in plan.program}) == leaves
    moved = losses(train(config))
    again = config.train.model_copy(update={"run_dir": str(tmp_path / "again")})
    memory = config.memory.model_copy(update={"activations": "recompute"})
    assert losses(train(config.model_copy(update={"memory": memory, "train": again}))) == moved


def test_a_slow_link_carries_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    on_a_link(monkeypatch, 1e6)
    kinds, said = chosen(tmp_path)
    assert Kind.OFFLOAD not in kinds
    assert said == []


@pytest.mark.parametrize(
    "memory",
    [{"activations": "recompute"}, {"device_memory": "1GiB"}, {"device": "cpu", "link_gb_per_s": None}],
)
def test_nobody_looks_where_there_is_nothing_to_choose(
    memory: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def measure_rates(*_: Any) -> Rates:
        raise AssertionError("timed for nothing")

    monkeypatch.setattr(module, "measure_rates", measure_rates)
    kinds, said = chosen(tmp_path, **memory)
    assert Kind.OFFLOAD not in kinds
    assert said == []


def test_what_cannot_be_timed_is_said_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def measure_rates(*_: Any) -> Rates:
        raise ModelError("planted")

    monkeypatch.setattr(module, "measure_rates", measure_rates)
    kinds, said = chosen(tmp_path)
    assert Kind.OFFLOAD not in kinds
    assert said == ["memory.activations: auto offloads nothing: nothing could be predicted: planted"]


def test_the_run_does_what_was_chosen_and_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    on_a_link(monkeypatch, 1e12)
    config = tight(tmp_path)
    plan, forecast, *_ = foresee(config)
    assert Kind.OFFLOAD in {op.kind for op in plan.program}
    assert forecast is not None
    moved = losses(train(config))
    memory = config.memory.model_copy(update={"activations": "recompute"})
    again = config.train.model_copy(update={"run_dir": str(tmp_path / "again")})
    assert losses(train(config.model_copy(update={"memory": memory, "train": again}))) == moved


def losses(result: TrainResult) -> list[float]:
    lines = (Path(result.run_dir) / "heartbeat.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"model": {"attention": "eager"}, "memory": {"activations": "keep-attention"}},
            "no unit of this model has attention in an operation of its own; set model.attention=sdpa, and "
            "model.compile=off",
        ),
    ],
)
def test_a_choice_that_cannot_be_had_is_refused(sections: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        prepare(RunSpec.of(make_run(tmp_path, **sections), tmp_path), lambda _: None)
