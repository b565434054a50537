import json
import re
from functools import partial

import pytest

from cli.command_line import status_of
from doctor.records import gpu_machine
from hardware.fake_machine import CGROUP_V2, SERVER, build, link, measured, probed
from outsize.cli.text.probe_text import copies_by_size, describe
from outsize.hardware.cgroup import Fact
from outsize.hardware.link_fit import Piece, fit_link, summarize
from outsize.hardware.machine_file import DataRates, parse
from outsize.hardware.topology import break_even_tokens, starved_share
from tiny import tiny_model


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Stands in for the measurements: round numbers, whatever is asked for."""
    found = probed(build(tmp_path / "root", SERVER, CGROUP_V2), tmp_path)
    asked = []

    def stand_in(effort, directories, *, announce, wishes):
        asked.append((effort.mode, list(directories), wishes))
        announce("host memory and optimizer", 0, 4)
        return found

    monkeypatch.setattr("outsize.probing.run_probe.probe", stand_in)
    monkeypatch.chdir(tmp_path)
    return found, asked


run = partial(status_of, "probe")


def test_words_and_columns(found, capsys):
    assert run() == 0
    streams = capsys.readouterr()
    assert "[1/4] host memory and optimizer" in streams.err
    assert "Example 9000, 2 cores, 3 usable" in streams.out
    assert "RAM limit   1.00 GiB" in streams.out
    assert "quota       1.5 cores" in streams.out
    assert "10.0 us + 10.00 GB/s" in streams.out
    assert "cpu matmul bf16" in streams.out
    assert "devices.cpu.matmul_flops_per_s.bf16: not supported" in streams.out
    assert found[1][0][0] == "quick"


def test_where_a_link_changes_its_pace_is_told(tmp_path):
    found = probed(build(tmp_path / "root", SERVER), tmp_path)
    starts = ((2**10, 2e-6, 8e9), (2**17, 1e-5, 2e10), (2**24, 0.0, 1.5e10))
    pieces = tuple(Piece(num_bytes=size, latency_s=s, bytes_per_s=rate) for size, s, rate in starts)
    fit = fit_link({1024: 2e-6, 2048: 3e-6}, {4096: 5e-6}).model_copy(update={"pieces": pieces})
    links = (link("up").model_copy(update={"fit": fit}),)
    (cpu,) = (device.model_copy(update={"links": links}) for device in found.devices)
    told = describe(found.model_copy(update={"devices": (cpu,)}))
    assert "another line from 128.00 KiB, 16.00 MiB on; off by 0% on held-out sizes" in told


def test_json_and_file_are_the_machine(found, tmp_path, capsys):
    assert run("--full", "--json", "--directory", tmp_path, "--directory", "/", "-o", "machine.json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert parse(line) == found[0]
    assert parse((tmp_path / "machine.json").read_text()) == found[0]
    ((mode, directories, wishes),) = found[1]
    assert mode == "full"
    assert list(map(str, directories)) == [str(tmp_path), "/"]
    assert (wishes.tokenizer, wishes.tensors, wishes.num_ranks) == (None, None, None)


def test_wishes_reach_the_probe(found, tmp_path):
    model = tiny_model(tmp_path / "model")
    assert run("--ranks", 3, "--tokenizer", model) == 0
    ((_, _, wishes),) = found[1]
    assert wishes.num_ranks == 3
    assert wishes.tokenizer == model


def test_what_memory_and_products_are_beside_the_link_is_told(tmp_path):
    """Products at 100 GFLOP/s and a link of 10 GB/s: bf16 weights are hidden from 10 tokens on, fp32 ones from 20."""
    told = describe(probed(build(tmp_path / "root", SERVER), tmp_path))
    assert re.search(r"cpu: host memory over link +1.9 x +19.00 GB/s", told)
    assert re.search(r"cpu: fp32 weights hidden from +20 tokens", told)


@pytest.mark.parametrize(("tokens", "share"), [(1, 0.95), (10, 0.5), (20, 0.0), (1000, 0.0)])
def test_compute_starves_by_what_copies_outlast_it(tokens, share):
    assert starved_share(tokens, 1e11, 1e10, 4) == pytest.approx(share)
    assert break_even_tokens(1e11, 1e10, 4) == pytest.approx(20)


def test_rows_of_everything_that_a_probe_may_find(tmp_path):
    machine = gpu_machine(tmp_path)
    sums = summarize({2**20: (0.001,), 2**21: (0.002,)}, backend="gloo", num_ranks=2, note="")
    data = DataRates(
        tokenizer=Fact.read("BPE", "x"),
        tokenizer_tokens_per_s={"1": measured(1.5e6)},
        loader_tokens_per_s={"2": measured(1.2e8)},
    )
    first, second = machine.devices
    text = describe(
        machine.model_copy(
            update={
                "devices": (first, second),
                "all_reduce": sums,
                "data": data,
                "left_out": Fact.read("sums over processes", "after 9 s"),
            }
        )
    )
    for expected in (
        "79% of 31.51 GB/s in theory",
        "cuda:0 up while all copy",
        "25.00 GB/s alone",
        "PCIe peer by rate, PCIe peer by topology",
        "bus bandwidth 1.05 GB/s",
        "tokenizer, threads: 1",
        "120 M tokens/s",
        "cuda:1 from memory of node 0",
        "left out, after 9 s: sums over processes",
        "beside each other: product 1.10x, copies 1.10x",
    ):
        assert expected in text, expected


def test_comparison_shows_what_differs(found, tmp_path, capsys):
    slower = probed(tmp_path / "root", tmp_path, matmul=2e11)
    (tmp_path / "old.json").write_text(slower.to_json())
    assert run("--compare", "old.json") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("1 of ") for line in lines)
    assert "devices.cpu.matmul_flops_per_s.fp32  2e+11 -> 1e+11  0.50x" in lines
    assert run("--compare", "old.json", "--json") == 0
    compared = json.loads(capsys.readouterr().out)["compared"]
    assert [change["ratio"] for change in compared if change["is_significant"]] == [0.5]


def test_mistakes_are_told_before_anything_is_measured(found, tmp_path, capsys):
    assert run("--compare", "absent.json") == 2
    assert "cannot read absent.json" in capsys.readouterr().err
    assert run("-o", "no/such/machine.json") == 2
    assert "there is no such directory; create it first" in capsys.readouterr().err
    assert run("--tokenizer", "absent.json") == 2
    assert "no such file" in capsys.readouterr().err
    assert run("--tensors", "absent.safetensors") == 2
    assert "name a safetensors file" in capsys.readouterr().err
    assert found[1] == []


def test_reasons_that_many_share_are_told_once(tmp_path):
    text = describe(probed(tmp_path / "empty", tmp_path))
    lines = [line for line in text.splitlines() if "/empty/proc/meminfo" in line]
    assert len(lines) == 1
    assert " and 1 more: " in lines[0]


def test_copies_by_size_are_those_that_were_timed(found, capsys):
    machine, _ = found
    links = [
        link(way, path=path, bytes_per_s=rate)
        for path, rate in (("pinned", 2e10), ("pageable", 1e10))
        for way in ("up", "down")
    ]
    device = machine.devices[0].model_copy(update={"links": tuple(links)})
    lines = copies_by_size(machine.model_copy(update={"devices": (device,)}))
    assert len(lines) == 1 + 14
    assert "pinned by pageable, up" in lines[0]
    assert lines[1].split("  ")[0] == "1.00 KiB"
    assert lines[-1].rstrip().endswith("1.98x")
    assert run("--table") == 0
    assert "1.00 KiB" in capsys.readouterr().out
