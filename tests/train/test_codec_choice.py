from dataclasses import replace
from pathlib import Path

import pytest

from outsize.accelerators import Devices
from outsize.codecs.transport import CodecRates, Transport
from outsize.errors import ModelError
from outsize.hardware.cards import parse_gpus
from outsize.hardware.machine_spec import Figure
from outsize.planner.simulate.costs import UnitTimes
from outsize.session.decide import decide as module
from outsize.session.decide.lane_rates import codec_rates, crossing_rates
from outsize.session.decide.rates import Rates
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import foresee
from outsize.training.run import train
from support import make_run

AUTO = {"weights": "auto"}
EMULATED = {"device": "emulated"}


def on_a_link(monkeypatch, bytes_per_s, decode_bytes_per_s=1e12, down_bytes_per_s=1e12):
    """Units take a millisecond each, the optimizer nothing, and nor do gradients; weights go up at ``bytes_per_s``."""
    machine = parse_gpus("4090")
    link = replace(
        machine.links[0],
        up_bytes_per_s=Figure(value=bytes_per_s, source="test"),
        down_bytes_per_s=Figure(value=down_bytes_per_s, source="test"),
        latency_s=Figure(value=1e-9, source="test"),
    )
    rates = CodecRates(encode_bytes_per_s=1e12, decode_bytes_per_s=decode_bytes_per_s)

    def measure_rates(prepared, _):
        count = prepared.split.spec.num_streamed
        times = UnitTimes(forward_s=(1e-3,) * count, backward_s=(3e-3,) * count)
        workers = prepared.machine.num_workers
        here = replace(machine, gpus=machine.gpus * workers, links=(link,) * workers)
        return Rates(here, times, microbatches=prepared.config.microbatches)

    monkeypatch.setattr(module, "measure_rates", measure_rates)
    monkeypatch.setattr(
        module, "codec_rates", lambda _, transport: None if transport.is_raw("weights") else rates
    )
    monkeypatch.setattr(
        module, "crossing_rates", lambda *_: dict.fromkeys(("gradients", "activations"), rates)
    )


def chosen(tmp_path, device="emulated", **sections):
    said: list[str] = []
    config = make_run(tmp_path, memory={"device": device}, transport=AUTO, **sections)
    prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)
    assert prepared.plan.transport.weights == "raw"
    found, _ = module.choose_plan(prepared, said.append)
    return found.plan.transport.weights, said


@pytest.mark.parametrize("device", ["emulated", "emulated:2"])
def test_weights_are_encoded_where_a_step_waits_for_the_link(device, tmp_path: Path, monkeypatch):
    on_a_link(monkeypatch, 1e6)
    codec, said = chosen(tmp_path, device, model={"dtype": "bf16"})
    assert codec == "lossless3"  # of bf16 it takes 0.70, and lossless4 0.75
    assert said[0].startswith("transport.weights: auto is lossless3: a step is predicted to take ")


ALL = {"weights": "auto", "gradients": "auto", "activations": "auto"}


@pytest.mark.parametrize("device", ["emulated", "emulated:2"])
def test_every_crossing_is_searched_by_itself(device, tmp_path: Path, monkeypatch):
    """Gradients wait for their way down here, and weights have a fast one up."""
    on_a_link(monkeypatch, 1e11, down_bytes_per_s=1e6)
    said: list[str] = []
    sections = {"model": {"dtype": "bf16"}, "train": {"microbatches": 2}}
    prepared = prepare(
        RunSpec.of(make_run(tmp_path, memory={"device": device}, transport=ALL, **sections), tmp_path),
        lambda _: None,
    )
    found, _ = module.choose_plan(prepared, said.append)
    assert found.plan.transport.weights == "raw"
    assert found.plan.transport.gradients == "lossless4"
    assert found.plan.transport.exact
    assert [line.partition(":")[0] for line in said] == [f"transport.{name}" for name in ALL]
    on_a_link(monkeypatch, 1e11, decode_bytes_per_s=1e5, down_bytes_per_s=1e6)
    slow, _ = module.choose_plan(prepared, said.append)
    assert slow.plan.transport.gradients == "raw"


def test_what_gpus_and_rings_do_not_encode(tmp_path: Path):
    def refused(crossing, **sections):
        said: list[str] = []
        memory = {**EMULATED, "resident": "none"}
        config = make_run(tmp_path, memory=memory, transport={crossing: "auto"}, **sections)
        prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)
        if crossing == "activations":
            prepared = replace(prepared, machine=replace(prepared.machine, devices=Devices.parse("cuda:0")))
        assert module.choose_plan(prepared, said.append) == (prepared, None)
        return said

    assert refused("activations") == [
        "transport.activations: auto is raw: a GPU decodes what keeps every bit, and does not encode it"
    ]
    clip = {"max_grad_norm": 0.0}
    assert refused("gradients", optimizer=clip) == [
        "transport.gradients: auto is raw: gradients pass through a ring, tile by tile"
    ]


def test_the_shorter_codec_must_be_worth_it(tmp_path: Path, monkeypatch):
    on_a_link(monkeypatch, 1e6)
    assert chosen(tmp_path)[0] == "lossless4"  # of fp32 it takes 0.876, and lossless3 0.85


def test_weights_stay_as_they_are_where_the_link_is_fast(tmp_path: Path, monkeypatch):
    on_a_link(monkeypatch, 1e11)
    codec, said = chosen(tmp_path)
    assert (codec, said) == ("raw", ["transport.weights: auto is raw: a step does not wait for the link"])


def test_a_device_that_decodes_no_faster_than_its_link_is_sent_nothing_encoded(tmp_path: Path, monkeypatch):
    on_a_link(monkeypatch, 1e6, decode_bytes_per_s=1e6)
    assert chosen(tmp_path)[0] == "raw"


def test_a_plan_without_room_for_a_codec_goes_without(tmp_path: Path, monkeypatch):
    on_a_link(monkeypatch, 1e6)
    config = make_run(tmp_path, memory=EMULATED, transport=AUTO)
    least = prepare(RunSpec.of(config, tmp_path), lambda _: None).plan.total_bytes("host")
    memory = {**EMULATED, "host_memory": least}
    prepared = prepare(
        RunSpec.of(make_run(tmp_path, memory=memory, transport=AUTO), tmp_path), lambda _: None
    )
    assert module.choose_plan(prepared, lambda _: None)[0].plan.transport.weights == "raw"


@pytest.mark.parametrize("memory", [{"device": "cpu"}, {"device": "emulated", "home": "disk"}])
def test_where_there_is_no_link_auto_is_raw(memory, tmp_path: Path):
    said: list[str] = []
    prepared = prepare(
        RunSpec.of(make_run(tmp_path, memory=memory, transport=AUTO), tmp_path), lambda _: None
    )
    found, rates = module.choose_plan(prepared, said.append)
    assert (found, rates) == (prepared, None)
    assert "there is no link" in said[0]


def test_without_a_prediction_auto_is_raw_and_says_why(tmp_path: Path, monkeypatch):
    def fail(*_):
        raise ModelError("no clock")

    monkeypatch.setattr(module, "measure_rates", fail)
    codec, said = chosen(tmp_path)
    assert (codec, said) == ("raw", ["transport.weights: auto is raw: nothing could be predicted: no clock"])


def test_a_named_codec_is_not_chosen_again(tmp_path: Path):
    config = make_run(tmp_path, memory=EMULATED, transport={"weights": "lossless3"})
    prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)
    assert module.choose_plan(prepared, print) == (prepared, None)


def test_a_run_computes_the_same_whatever_auto_comes_to(tmp_path: Path, monkeypatch):
    losses = []
    for directory, bytes_per_s in (("slow", 1e6), ("fast", 1e11)):
        on_a_link(monkeypatch, bytes_per_s)
        said: list[str] = []
        steps: list[float] = []
        run = make_run(tmp_path / directory, memory=EMULATED, transport=AUTO)
        train(run, announce=said.append, progress=lambda record, steps=steps: steps.append(record.loss))
        assert any("auto is lossless4" in line for line in said) == (directory == "slow")
        losses.append(steps)
    assert losses[0] == losses[1]


def test_a_dry_run_says_what_auto_would_come_to(tmp_path: Path, monkeypatch):
    on_a_link(monkeypatch, 1e6)
    plan, _, *_ = foresee(make_run(tmp_path, memory=EMULATED, transport=AUTO))
    assert plan.transport.weights == "lossless4"


def test_codecs_are_timed_here(tmp_path: Path):
    config = make_run(tmp_path, memory=EMULATED, transport={"weights": "lossless4"})
    prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)
    found = codec_rates(prepared, prepared.plan.transport)
    assert found is not None
    assert min(found.encode_bytes_per_s, found.decode_bytes_per_s) > 1e6
    transport = Transport(gradients="lossless4", activations="int8")
    others = crossing_rates(prepared, transport)
    assert set(others) == {"gradients", "activations"}
    assert min(min(rate.encode_bytes_per_s, rate.decode_bytes_per_s) for rate in others.values()) > 1e5
    assert crossing_rates(prepared, prepared.plan.transport) == {}


def test_what_is_encoded_since_nothing_else_fits_is_not_said_to_be_raw(tmp_path: Path, monkeypatch):
    """As `prepare` leaves frozen weights that host memory holds only so."""

    def fail(*_):
        raise ModelError("no clock")

    monkeypatch.setattr(module, "measure_rates", fail)
    said: list[str] = []
    prepared = prepare(
        RunSpec.of(make_run(tmp_path, memory=EMULATED, transport=AUTO), tmp_path), lambda _: None
    )
    encoded = replace(prepared, plan=replace(prepared.plan, transport=Transport(weights="lossless3")))
    module.choose_plan(encoded, said.append)
    assert said == ["transport.weights: auto is lossless3: nothing could be predicted: no clock"]
    monkeypatch.setattr(module, "_why_raw", lambda *_: " where several ranks share each step")
    assert module.choose_plan(encoded, said.append) == (encoded, None)
    assert len(said) == 1


def test_what_a_lossy_codec_does_or_does_not_do_is_said(tmp_path: Path):
    """A curve of a run whose codec had nothing to encode would say that the codec costs nothing."""
    said: list[str] = []
    config = make_run(tmp_path, memory=EMULATED, transport={"activations": "int4", "gradients": "int8"})
    module.choose_plan(prepare(RunSpec.of(config, tmp_path), lambda _: None), said.append)
    assert said == [
        "transport.activations: int4 has no effect in this plan: inputs of units stay on the device",
        "transport.gradients: int8 rounds what crosses, so results are not those of an exact run",
    ]
