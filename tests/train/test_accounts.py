"""What a real run writes about itself, held to the schema and to itself."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from outsize.accelerators import CPU
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.telemetry.run_reading import Line
from outsize.training import measures
from outsize.training.measures import about
from outsize.training.run import train
from support import make_run

RUNS = {
    "host": {"home": "host"},
    "disk": {"home": "disk"},
    "a slow link": {"device": "emulated:1", "link_gb_per_s": 0.002},
    "two workers": {"device": "emulated:2", "home": "host"},
    "activations on disk": {"device": "emulated:1", "home": "disk", "offload": True},
    "adapters": {"device": "emulated:1", "home": "host"},
}


@pytest.fixture(scope="module", params=RUNS, ids=lambda name: name.replace(" ", "-"))
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    method = {"train": {"method": "lora"}} if request.param == "adapters" else {}
    config = make_run(tmp_path_factory.mktemp("run"), memory=RUNS[request.param], **method)
    train(config)
    return Path(config.train.run_dir)


@pytest.fixture(scope="module")
def beats(run_dir: Path):
    return [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]


def test_every_line_is_what_the_schema_says(beats):
    for beat in beats:
        assert Line.model_validate_json(json.dumps(beat)).slowed_s is not None


def test_waits_add_up_to_the_idle_time_of_every_compute_lane(beats):
    assert [bool(beat["waits_s"]) for beat in beats] == [
        beat["step"] <= 3 or beat["step"] % 4 == 1 for beat in beats
    ]
    for beat in beats:
        assert beat["waits_s"].keys() <= beat["idle_s"].keys()
        for lane, idle_s in beat["idle_s"].items():
            if beat["waits_s"]:
                booked = sum(s for owners in beat["waits_s"][lane].values() for s in owners.values())
                assert booked == pytest.approx(idle_s, rel=0.02)
            assert beat["busy_s"][lane] + idle_s == pytest.approx(beat["seconds"], rel=0.02, abs=0.02)


def test_bytes_by_lane_add_up(beats):
    for beat in beats:
        wire = beat["wire_bytes"]
        assert beat["bytes_up"] == sum(size for lane, size in wire.items() if lane.startswith("up:"))
        assert beat["bytes_down"] == sum(size for lane, size in wire.items() if lane.startswith("down:"))
        assert (beat["bytes_read"], beat["bytes_written"]) == (wire["disk:read"], wire["disk:write"])
        assert beat["logical_bytes"] == wire


def test_each_line_holds_the_bytes_that_the_plan_says(run_dir: Path, beats):
    """Of its own step, to the byte: the last one, too, and the first but for frozen weights that stay from then on."""
    planned = json.loads((run_dir / "plan.json").read_text())["bytes_per_step"]
    moved = [
        {
            "up": beat["bytes_up"],
            "down": beat["bytes_down"],
            "disk_read": beat["bytes_read"],
            "disk_written": beat["bytes_written"],
            "across": sum(size for lane, size in beat["wire_bytes"].items() if lane.startswith("peer")),
        }
        for beat in beats
    ]
    assert len(moved) == 4
    if "method: lora" in (run_dir / "config.yaml").read_text():
        assert moved[0]["up"] > planned["up"]
        moved[0]["up"] = planned["up"]
    assert moved == [planned] * 4


def test_memory_is_within_its_budget_and_time_is_counted(beats):
    for beat in beats:
        for tier in beat["tiers"].values():
            assert 0 <= tier["used_bytes"] <= tier["high_water_bytes"] <= tier["budget_bytes"]
        assert 0 < beat["mfu"] < 1
        assert beat["cpu_s"] > 0
        assert beat["num_compute_ops"] > 0
        assert beat["fallbacks"].keys() <= {"buffered"}


def test_a_slow_progress_is_booked_between_steps(tmp_path: Path):
    config = make_run(tmp_path)
    train(config, progress=lambda _: time.sleep(0.05))
    beat = json.loads((Path(config.train.run_dir) / "heartbeat.jsonl").read_text().splitlines()[2])
    assert beat["between_s"] >= 0.05
    assert beat["waits_s"]["compute:w0"]["between steps"]["none"] == pytest.approx(beat["between_s"], rel=0.1)


def test_a_run_says_what_it_is(tmp_path: Path):
    config = make_run(tmp_path)
    train(config)
    told = json.loads((Path(config.train.run_dir) / "run.json").read_text())
    assert told["units"][1]["kind"] == "block"
    assert told["flops_per_step"] > 0
    assert told["peak_flops_per_s"] > 1e6
    assert "512 x 512" in told["peak_source"]
    assert told["tokens_per_microbatch"] == 32


def test_a_rank_says_what_its_own_microbatches_hold(tmp_path: Path):
    config = make_run(tmp_path, train={"microbatches": 2})
    alone = prepare(RunSpec.of(config, tmp_path), lambda _: None)
    nobody = measures.Peak(flops_per_s=None, source="nobody")

    def tokens(size: int) -> int:
        prepared = replace(alone, run=replace(alone.run, group=SimpleNamespace(rank=0, size=size)))
        return int(about(prepared, None, nobody)["tokens_per_microbatch"])

    assert (tokens(1), tokens(2)) == (config.tokens_per_step // 2, config.tokens_per_step // 4)


@pytest.mark.parametrize(
    ("bf16", "fp32", "said"), [(2e10, 9e10, "4.5 times"), (9e10, 9e10, ""), (9e10, None, "")]
)
def test_a_processor_that_is_slow_in_16_bits_is_told_of(bf16: float, fp32: float | None, said: str):
    line = measures.slow_products(measures.Peak(flops_per_s=bf16, source="", fp32_flops_per_s=fp32), "bf16")
    assert bool(line) == bool(said)
    assert said in line


def test_fp32_is_measured_beside_another_dtype_of_a_cpu():
    assert measures.peak_of(CPU, "bf16").fp32_flops_per_s > 0
    assert measures.peak_of(CPU, "fp32").fp32_flops_per_s is None


def test_peaks_are_those_of_data_sheets():
    assert measures.promised(["NVIDIA H100 80GB HBM3"], "bf16").flops_per_s == 989e12
    assert measures.promised(["NVIDIA GeForce RTX 4090"] * 2, "fp32").flops_per_s == pytest.approx(
        2 * 82.6e12
    )
    # Cards that share a name have sheets of their own.
    assert measures.promised(["NVIDIA H100 PCIe"], "bf16").flops_per_s == 756e12
    assert measures.promised(["NVIDIA GeForce RTX 4090 Laptop GPU"], "bf16").flops_per_s == 79.4e12
    for other in ("Tesla T4", "Example 9000"):  # one without products in bf16, and one that nobody knows
        peak = measures.promised([other], "bf16")
        assert peak.flops_per_s is None
        assert other in peak.source
