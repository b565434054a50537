import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from contracts import in_ranks
from outsize.errors import ConfigError, ModelError
from outsize.group.group import Pace, SingleGroup
from outsize.hardware.from_probe import read_machine
from outsize.hardware.machine_spec import Peer, from_json
from outsize.planner.simulate.costs import UnitTimes
from outsize.planner.simulate.gpu_times import Trace
from outsize.session.decide import rates
from outsize.session.decide.lane_rates import SMALL_STATE_BYTES, kept_rates, lane_rates
from outsize.session.job.demand import recompute_shares
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training import forecast as module
from outsize.training.forecast import foresee
from outsize.training.run import train
from support import make_run

ALONE = Pace(SingleGroup())


@pytest.fixture(scope="module", params=[("host", "cpu"), ("disk", "cpu"), ("host", "emulated:2")])
def finished(request, tmp_path_factory):
    home, device = request.param
    said: list[str] = []
    config = make_run(tmp_path_factory.mktemp("run"), memory={"home": home, "device": device})
    result = train(config, announce=said.append)
    return config, result, said


def test_a_run_says_once_what_was_predicted_and_what_came_of_it(finished):
    _, result, said = finished
    assert sum(line.startswith("a step is predicted to take") for line in said) == 1
    assert sum("was predicted to take" in line for line in said) == 1
    assert min(result.predicted_step_s, result.measured_step_s, result.expected_step_s) > 0
    assert set(result.to_dict()) >= {"predicted_step_s", "measured_step_s", "expected_step_s"}
    told = json.loads((Path(result.run_dir) / "prediction.json").read_text())
    assert told["predicted_step_s"] == result.predicted_step_s
    assert sum(part["measured_s"] for part in told["parts"]) == pytest.approx(result.measured_step_s)
    assert sum(part["predicted_s"] for part in told["parts"]) == pytest.approx(result.predicted_step_s)
    assert min(part[side] for part in told["parts"] for side in ("predicted_s", "measured_s")) >= 0
    assert {lane["name"] for lane in told["lanes"]} >= {"compute:w0", "host"}


def test_the_rates_of_a_run_are_a_machine_for_the_next_one_and_for_plan(finished):
    config, result, _ = finished
    machine = read_machine(Path(result.run_dir) / "machine.json")
    prepared = prepare(RunSpec.of(config, Path(result.run_dir)), lambda _: None)
    assert kept_rates(Path(result.run_dir), prepared) == machine
    assert machine.host.adamw_params_per_s.source == "the first steps of a run"
    assert machine.gpus[0].peak_flops_per_s["fp32"].measured


def test_rates_of_another_device_do_not_serve(finished, tmp_path):
    config, result, _ = finished
    other = "emulated:1" if config.memory.device != "emulated:1" else "cpu"
    run = make_run(tmp_path, memory={"device": other})
    assert kept_rates(Path(result.run_dir), prepare(RunSpec.of(run, tmp_path), lambda _: None)) is None
    (tmp_path / "machine.json").write_text("{")
    assert kept_rates(tmp_path, prepare(RunSpec.of(config, tmp_path), lambda _: None)) is None


def test_copies_between_devices_go_by_the_trace_and_by_what_throttles_them(finished, tmp_path):
    config, result, _ = finished
    found = read_machine(Path(result.run_dir) / "machine.json")
    figure = found.links[0].up_bytes_per_s
    pairs = (Peer(source=a, target=1 - a, bytes_per_s=figure, own_wire=True) for a in range(2))
    machine = replace(found, gpus=found.gpus[:1] * 2, links=found.links[:1] * 2, peers=tuple(pairs))
    traced = module.with_rates(machine, Trace(rates={"peer:w1-w0": 5.0}))
    assert [peer.bytes_per_s.value for peer in traced.peers] == [figure.value, 5.0]
    throttled = make_run(tmp_path, memory=config.memory.model_dump() | {"peer_gb_per_s": 2.0})
    assert kept_rates(Path(result.run_dir), prepare(RunSpec.of(throttled, tmp_path), lambda _: None)) is None


def test_a_dry_run_predicts_and_leaves_nothing(tmp_path):
    config = make_run(tmp_path, memory={"home": "disk"})
    before = sorted(tmp_path.rglob("*"))
    plan, found, *_ = foresee(config)
    assert found is not None
    assert found.step_s > 0
    assert plan.layout.commits
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_dry_run_times_the_kernels_of_the_run(deterministic: bool, tmp_path, monkeypatch):
    """On a GPU attention whose bits repeat has a slower backward."""
    timed, repeats = rates._times, []

    def times(prepared, pace):
        repeats.append(torch.are_deterministic_algorithms_enabled())
        return timed(prepared, pace)

    monkeypatch.setattr(rates, "_times", times)
    foresee(make_run(tmp_path, train={"deterministic": deterministic}))
    assert repeats == [deterministic]
    assert not torch.are_deterministic_algorithms_enabled()


def test_compute_is_slowed_by_what_it_takes_longer_than_its_units_alone(tmp_path, monkeypatch):
    config = make_run(tmp_path, memory={"home": "host", "activations": "recompute"})
    timed, of_units = rates._times, []

    def times(prepared, pace):
        found, flops = timed(prepared, pace)
        of_units.append(found)
        return found, flops

    monkeypatch.setattr(rates, "_times", times)
    _, found, *_ = foresee(config)
    assert found is not None
    (alone,) = of_units
    microbatch_s = sum(
        (*alone.forward_s[:-1], *alone.backward_s)
    )  # the last unit goes forward in its backward
    assert found.alone_s == pytest.approx(config.train.microbatches * microbatch_s)
    busy_s = {"compute:w0": found.alone_s + 0.5, "host": 9.0}
    assert found.slowed_s(busy_s) == pytest.approx(0.5)
    assert found.slowed_s({"compute:w0": found.alone_s / 2}) == 0.0


def test_products_are_timed_for_an_optimizer_that_has_some(tmp_path):
    """On a matrix of the model, and so in its prediction; read back as it was written."""
    prepared = prepare(RunSpec.of(make_run(tmp_path, optimizer={"name": "muon"}), tmp_path), lambda _: None)
    times, flops = rates._times(prepared, ALONE)
    machine = lane_rates(prepared, tmp_path / "store", times, flops, ALONE)
    assert machine.host.products.measured
    assert "5 iterations on 32 x 48" in machine.host.products.source
    assert from_json(machine.to_json()) == machine
    prepared = prepare(RunSpec.of(make_run(tmp_path), tmp_path), lambda _: None)
    assert lane_rates(prepared, tmp_path / "store", times, flops, ALONE).host.flops_per_s is None


def test_a_large_state_has_its_disk_timed_and_nothing_stays_there(tmp_path, monkeypatch):
    config = make_run(tmp_path, memory={"home": "disk"})
    prepared = prepare(RunSpec.of(config, tmp_path), lambda _: None)
    before = sorted(tmp_path.rglob("*"))
    times, flops = rates._times(prepared, ALONE)
    assert not lane_rates(prepared, tmp_path / "store", times, flops, ALONE).disk.read_bytes_per_s.measured
    assert SMALL_STATE_BYTES > 2**20
    monkeypatch.setattr("outsize.session.decide.lane_rates.SMALL_STATE_BYTES", 0)
    assert lane_rates(prepared, tmp_path / "store", times, flops, ALONE).disk.read_bytes_per_s.measured
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("error", [ConfigError("no clock"), ModelError("no clock"), RuntimeError("no clock")])
def test_a_run_without_a_prediction_trains_and_says_why(tmp_path, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(rates, "_times", fail)
    said: list[str] = []
    result = train(make_run(tmp_path), announce=said.append)
    assert "no prediction of step times: no clock" in said
    assert (result.steps, result.predicted_step_s) == (4, None)


def test_recomputes_that_end_early_are_predicted_shorter():
    whole = UnitTimes(forward_s=(1.0, 4.0, 0.0), backward_s=(3.0, 12.0, 9.0))
    found = rates._less_recompute(whole, (1.0, 0.75, 1.0))
    assert (found.forward_s, found.backward_s) == (whole.forward_s, (3.0, 11.0, 9.0))
    assert [found.recompute(unit) for unit in range(2)] == [1.0, 3.0]


def test_the_recompute_of_a_block_leaves_out_its_last_product(tmp_path):
    prepared = prepare(RunSpec.of(make_run(tmp_path), tmp_path), lambda _: None)
    embedding, *blocks, head = recompute_shares(prepared.split, prepared.measured)
    assert embedding == head == 1.0
    assert all(0.5 < share < 1.0 for share in blocks)


def test_fewer_sequences_are_timed_before_shorter_ones():
    assert rates._timed_size(8, 100, 512) == (5, 100)
    assert rates._timed_size(8, 2048, 512) == (1, 512)
    assert rates._timed_size(1, 16, 512) == (1, 16)


def test_ranks_are_predicted_with_the_slowest_of_them(tmp_path, monkeypatch):
    """And without one that could not measure, which the others do not wait for."""

    def fails(prepared, run_dir):
        raise ModelError("no clock")

    monkeypatch.setattr(module, "measure_rates", fails)

    def work(group):
        if group.rank == 2:
            with pytest.raises(ModelError):
                module._measured_here(SimpleNamespace(group=group), tmp_path)
            return None
        slower = 1.0 + group.rank
        times = UnitTimes(forward_s=(slower, 0.0), backward_s=(2 * slower, 4 * slower))
        return rates.of_slowest(group, rates.Rates(None, times), rates.Exchanged(5.0 - group.rank))

    first, second, _ = in_ranks(3, work)
    assert first.times == second.times == UnitTimes(forward_s=(2.0, 0.0), backward_s=(4.0, 8.0))
    assert first.net_bytes_per_s == second.net_bytes_per_s == 4.0


def test_ranks_are_compared_by_their_steps_not_by_their_microbatches():
    """The first has one microbatch, and the second, a little slower, four."""

    def work(group):
        count, share = (4, 0.3) if group.rank else (1, 1.0)
        times = UnitTimes(forward_s=(share,), backward_s=(2 * share,))
        alone = rates.Rates(None, times, microbatches=count)
        return rates.of_slowest(group, alone, rates.Exchanged()).times.forward_s

    first, second = in_ranks(2, work)
    assert first == pytest.approx((1.2,))
    assert second == pytest.approx((0.3,))
