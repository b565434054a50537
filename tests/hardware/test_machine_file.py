import json

import pytest

from hardware.fake_machine import CGROUP_V2, SERVER, build, link, measured, probed
from outsize.errors import ConfigError
from outsize.hardware.cgroup import Measurement
from outsize.hardware.from_probe import machine_of, read_machine
from outsize.hardware.link_fit import Piece
from outsize.hardware.machine_file import compare, parse, read, readings


@pytest.fixture
def found(tmp_path):
    return probed(build(tmp_path, SERVER, CGROUP_V2), tmp_path)


def test_the_file_reads_back_as_it_was(found):
    assert parse(found.to_json()) == found


def test_every_reading_has_a_source_and_a_value_or_a_reason(found):
    told = dict(readings(found))
    assert len(told) > 60
    for name, reading in told.items():
        assert reading.source, name
        if isinstance(reading, Measurement):
            assert (reading.status == "measured") == bool(reading.samples) == (reading.median is not None), (
                name
            )


def test_median_and_spread_are_of_the_samples():
    rate = measured(4.0, 1.0, 2.0)
    assert (rate.median, rate.spread, rate.samples) == (2.0, 0.75, (4.0, 1.0, 2.0))
    with pytest.raises(ValueError, match="above zero"):
        measured(0.0)


def changed(found, **changes):
    return json.dumps(json.loads(found.to_json()) | changes)


def test_another_schema_is_refused_with_what_to_do(found):
    with pytest.raises(ConfigError, match="schema version 3, not 2; run `outsize probe` again"):
        parse(changed(found, schema_version=3))


def test_a_file_that_is_none_is_refused(found, tmp_path):
    with pytest.raises(ConfigError, match=r"mode: Input should be 'quick' or 'full'"):
        parse(changed(found, mode="slow"))
    with pytest.raises(ConfigError, match="surprise: Extra inputs"):
        parse(changed(found, surprise=1))
    for text in ("", "[]", "{}"):
        with pytest.raises(ConfigError, match=r"not what `outsize probe` found"):
            parse(text)
    with pytest.raises(ConfigError, match="cannot read"):
        read(tmp_path / "absent.json")


def test_the_planner_gets_measured_rates_only(found):
    machine = machine_of(found)
    (gpu,), (wire,) = machine.gpus, machine.links
    assert gpu.flops_per_s("fp32") == 1e11
    with pytest.raises(ConfigError, match="no rate for bf16"):
        gpu.flops_per_s("bf16")
    assert wire.up_bytes_per_s.value == pytest.approx(1e10)
    assert wire.down_bytes_per_s.value == pytest.approx(8e9)
    assert wire.latency_s.value == pytest.approx(1e-5)
    assert machine.host.memory_bytes == 2**30  # the control group's limit
    assert machine.host.cores == 2
    assert (machine.disk.read_bytes_per_s.value, machine.disk.write_bytes_per_s.value) == (2e9, 3e9)
    assert gpu.memory_bytes_per_s.measured
    assert machine.host.adamw_params_per_s.measured
    # Of products in bf16 on the host, only where it computes; otherwise by its cores, and the figure says so.
    assert machine.host.products.value == 2 * 40e9
    assert "assumed" in machine.host.products.source
    (device,) = found.devices
    device = device.model_copy(update={"matmul_flops_per_s": {"bf16": measured(7e10)}})
    assert machine_of(found.model_copy(update={"devices": (device,)})).host.products.value == 7e10


def test_a_link_in_pieces_is_priced_by_the_line_of_its_largest_copies(found):
    (device,) = found.devices
    up, *others = device.links
    pieces = (
        Piece(num_bytes=1024, latency_s=1e-6, bytes_per_s=2e9),
        Piece(num_bytes=2**20, latency_s=3e-5, bytes_per_s=1e10),
    )
    fit = up.fit.model_copy(update={"latency_s": 1e-6, "bytes_per_s": 1e10, "pieces": pieces})
    links = (up.model_copy(update={"fit": fit}), *others)
    other = found.model_copy(update={"devices": (device.model_copy(update={"links": links}),)})
    (wire,) = machine_of(other).links
    assert wire.latency_s.value + 2**24 / wire.up_bytes_per_s.value == pytest.approx(fit.copy_s(2**24))


def test_pinned_memory_is_the_link_of_a_gpu(found):
    (device,) = found.devices
    links = tuple(
        link(way, path=path, bytes_per_s=rate)
        for path, rate in (("pinned", 2.5e10), ("pageable", 6e9))
        for way in ("up", "down")
    )
    gpu = found.model_copy(update={"devices": (device.model_copy(update={"links": links}),)})
    assert machine_of(gpu).links[0].up_bytes_per_s.value == pytest.approx(2.5e10)


def test_the_planner_reads_a_probe_or_a_description(found, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(found.to_json())
    assert read_machine(path) == machine_of(found)
    path.write_text(machine_of(found).to_json())
    assert read_machine(path) == machine_of(found)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="not the description of a machine"):
        read_machine(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_machine(tmp_path / "absent.json")


def test_a_gap_that_no_plan_can_do_without_is_named(found):
    host = found.host.model_copy(update={"dram_triad_bytes_per_s": Measurement.absent("no memory")})
    with pytest.raises(ConfigError, match="did not measure DRAM triad: no memory"):
        machine_of(found.model_copy(update={"host": host}))
    (device,) = found.devices
    none = device.model_copy(
        update={"links": tuple(entry.model_copy(update={"fit": None, "note": "x"}) for entry in device.links)}
    )
    with pytest.raises(ConfigError, match="did not measure the link of cpu: x"):
        machine_of(found.model_copy(update={"devices": (none,)}))


def test_a_change_counts_beyond_both_spreads(tmp_path):
    root = build(tmp_path, SERVER)
    before, now = probed(root, tmp_path), probed(root, tmp_path, triad=1.9e10, matmul=0.5e11)
    told = {change.name: change for change in compare(before, now)}
    assert told["devices.cpu.matmul_flops_per_s.fp32"].ratio == 0.5
    assert told["devices.cpu.matmul_flops_per_s.fp32"].is_significant
    triad = told["host.dram_triad_bytes_per_s"]
    assert triad.ratio == pytest.approx(0.95)
    assert not triad.is_significant
    assert told["devices.cpu.links.dram copy up.bytes_per_s"].ratio == 1
    assert "devices.cpu.matmul_flops_per_s.bf16" not in told
