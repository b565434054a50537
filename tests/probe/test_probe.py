from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hardware.fake_machine import measured
from outsize.accelerators import CPU
from outsize.cli.text.probe_text import streaming_rows
from outsize.hardware.cgroup import Measurement
from outsize.hardware.machine_file import parse, readings
from outsize.hardware.topology import Overlap
from outsize.probing import run_probe
from outsize.probing.compute import measure_attention, measure_matmul
from outsize.probing.data_probe import measure_disk
from outsize.probing.effort import FULL, sample, shared, within_memory
from outsize.probing.link import measure_links, sizes
from outsize.probing.run_probe import probe
from probe.efforts import MIB, TINY
from threads import num_threads


def test_a_whole_probe_and_what_it_leaves_behind(tmp_path):
    told = []
    found = probe(TINY, [tmp_path], announce=lambda name, index, total: told.append((index, total)))
    assert told == [(index, len(told)) for index in range(len(told))]
    assert list(tmp_path.iterdir()) == []
    assert found.host.dram_triad_bytes_per_s.median > 0
    assert len(found.host.dram_triad_bytes_per_s.samples) >= 2
    assert found.host.adamw_params_per_s["bf16"].median > 0
    assert [depth.queue_depth for depth in found.disks[0].depths] == [1, 4]
    assert all(depth.read_bytes_per_s.median > 0 for depth in found.disks[0].depths)
    assert found.devices[0].matmul_flops_per_s["fp32"].median > 0
    assert found.devices[0].attention_flops_per_s["bf16"].median > 0
    (cpu,) = found.devices
    assert cpu.overlap.hidden_share() <= 1
    assert found.data.loader_tokens_per_s["1"].median > 0
    assert found.data.tokenizer.status == "assumed"
    assert "outsize all-reduce" in found.all_reduce.note
    assert found.left_out.value == ""
    assert parse(found.to_json()) == found
    for name, reading in readings(found):
        assert reading.source, name


def test_what_plans_need_comes_first_and_the_rest_only_within_the_time(tmp_path):
    found = probe(replace(TINY, limit_s=0.0), [tmp_path])
    assert found.devices[0].links[0].fit is not None
    assert found.devices[0].overlap is found.data is found.all_reduce is None
    assert "tokenizer and loader" in found.left_out.value


def test_what_is_left_out_was_not_announced_and_the_rest_repeats_nothing(tmp_path):
    told = []
    found = probe(replace(TINY, limit_s=0.0), [tmp_path], announce=lambda name, *_: told.append(name))
    assert not set(told) & set(found.left_out.value.split(", "))
    assert "of 0 s" in found.left_out.source
    # The time of each part was up as it began: one sample of everything.
    assert len(found.host.dram_triad_bytes_per_s.samples) == 1
    assert {len(point.copy_s.samples) for point in found.devices[0].links[0].points} == {1}


def test_times_that_cannot_all_be_true_are_taken_again_and_never_told(tmp_path, monkeypatch):
    """Both at once before the longer one ends."""
    overlap = Overlap(
        what="by the test",
        matmul_s=measured(0.010),
        copy_s=measured(0.010),
        both_s=measured(0.008),
        matmul_beside_s=measured(0.008),
        copy_beside_s=measured(0.008),
    )
    assert overlap.is_noisy()
    assert overlap.hidden_share() == 1
    assert overlap.model_copy(update={"both_s": measured(0.0204)}).hidden_share() == 0
    taken = []
    monkeypatch.setattr(run_probe, "measure_overlap", lambda *_: taken.append("overlap") or overlap)
    (cpu,) = probe(replace(TINY, loader_tokens=2**12, data_chars=500), [tmp_path]).devices
    assert taken == ["overlap"] * 2
    rows = [" ".join(row) for row in streaming_rows(cpu)]
    assert any(row.endswith("; noisy, measured twice") for row in rows)


def test_several_devices_share_the_time_of_one():
    assert shared(FULL, 8).copy_s == FULL.copy_s / 8
    assert shared(FULL, 1) == FULL


def test_without_proc_and_sys_everything_is_still_timed(tmp_path):
    found = probe(TINY, [tmp_path], root=tmp_path / "empty")
    assert found.inventory.memory.total_bytes.status == "not measured"
    assert found.host.dram_copy_bytes_per_s.status == "measured"


def test_one_thread_is_enough(tmp_path):
    with num_threads(1):
        found = probe(TINY, [])
    assert "1 threads" in found.host.dram_triad_bytes_per_s.source
    assert found.disks == ()


def test_a_directory_that_cannot_be_written_is_told():
    # Not even root may create a file there.
    rates = measure_disk(Path("/proc"), TINY)
    for depth in rates.depths:
        assert depth.read_bytes_per_s.status == "not measured"
        assert "cannot create /proc/" in depth.write_bytes_per_s.source
    assert rates.direct.value is None


def test_a_directory_that_is_not_there_is_told(tmp_path):
    rates = measure_disk(tmp_path / "absent", TINY)
    assert "cannot create" in rates.depths[0].read_bytes_per_s.source


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU is no device beside a GPU")
def test_the_link_of_a_cpu_is_memory_in_three_directions():
    links = {link.direction: link for link in measure_links(CPU, TINY)}
    assert list(links) == ["up", "down", "both"]
    for link in links.values():
        assert link.path == "dram copy"
        assert link.fit is not None, link.note
        assert [point.num_bytes for point in link.points] == [size for size, _ in sizes(MIB)]
        assert link.fit.held_out_median is not None
        assert {len(point.copy_s.samples) for point in link.points} == {TINY.num_samples_min}


def test_sizes_from_a_kilobyte_every_other_one_held_out():
    assert sizes(FULL.copy_bytes_max)[0] == (1024, False)
    assert sizes(FULL.copy_bytes_max)[-1] == (2**30, False)
    assert sizes(8192) == (
        *(
            (1024, False),
            (1536, True),
            (2048, False),
            (3072, True),
            (4096, False),
            (6144, True),
            (8192, False),
        ),
    )


def test_copies_never_run_over_the_end(monkeypatch):
    copied = []
    real = torch.Tensor.copy_

    def spy(target, source, **options):
        copied.append((target.nbytes, source.nbytes))
        return real(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", spy)
    links = list(measure_links(CPU, TINY))
    assert {point.num_bytes for point in links[0].points} == {size for size, _ in copied}
    assert all(size == other for size, other in copied)


def test_a_dtype_that_the_device_lacks_is_a_gap(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("not implemented for 'BFloat16'\nand a trace")

    monkeypatch.setattr(torch, "mm", refuse)
    assert measure_matmul(CPU, "bf16", TINY) == Measurement.absent(
        "bf16 n x n product, n =: not implemented for 'BFloat16'"
    )


def test_little_memory_makes_little_arrays():
    small = within_memory(FULL, 512 * MIB)
    assert small.array_bytes == small.copy_bytes_max == 32 * MIB
    assert within_memory(FULL, None) == FULL
    assert within_memory(FULL, 10**12) == FULL
    assert within_memory(FULL, 0).array_bytes == MIB


def test_little_memory_leaves_out_what_needs_more(tmp_path):
    small = within_memory(replace(TINY, queue_depths=(1, 2, 16)), 100 * MIB)
    assert small.disk_buffer_bytes == 8 * MIB
    assert [depth.queue_depth for depth in measure_disk(tmp_path, small).depths] == [1, 2]
    assert within_memory(TINY, 0).disk_buffer_bytes == 4 * MIB


def test_no_tensor_of_attention_is_larger_than_an_array():
    eager = replace(TINY, matmul_s=1e9, array_bytes=4 * MIB)
    assert measure_attention(CPU, "fp32", eager).source.endswith("tokens = 1024")


def test_little_memory_makes_little_matrices():
    assert measure_matmul(CPU, "fp32", replace(TINY, matmul_s=1e9)).source.endswith("n = 512")


def test_the_first_repetition_does_not_count():
    calls = []
    assert len(sample(lambda: calls.append(1), seconds=0.0, num_min=3)) == 3
    assert len(calls) == 4
