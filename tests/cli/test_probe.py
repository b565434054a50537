import json

import pytest

from hardware.fake_machine import CGROUP_V2, SERVER, build, probed
from outsize.cli import main
from outsize.cli.probe_text import describe
from outsize.hardware.machine_file import parse


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Stands in for the measurements: round numbers, whatever is asked for."""
    found = probed(build(tmp_path / "root", SERVER, CGROUP_V2), tmp_path)
    asked = []

    def stand_in(effort, directories, *, announce):
        asked.append((effort.mode, list(directories)))
        announce("host memory and optimizer", 0, 4)
        return found

    monkeypatch.setattr("outsize.probe.run.probe", stand_in)
    monkeypatch.chdir(tmp_path)
    return found, asked


def run(*arguments):
    with pytest.raises(SystemExit) as done:
        main(["probe", *map(str, arguments)])
    return done.value.code or 0


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


def test_json_and_file_are_the_machine(found, tmp_path, capsys):
    assert run("--full", "--json", "--directory", tmp_path, "--directory", "/", "-o", "machine.json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert parse(line) == found[0]
    assert parse((tmp_path / "machine.json").read_text()) == found[0]
    ((mode, directories),) = found[1]
    assert mode == "full"
    assert list(map(str, directories)) == [str(tmp_path), "/"]


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
    assert found[1] == []


def test_reasons_that_many_share_are_told_once(tmp_path):
    text = describe(probed(tmp_path / "empty", tmp_path))
    lines = [line for line in text.splitlines() if "/empty/proc/meminfo" in line]
    assert len(lines) == 1
    assert " and 1 more: " in lines[0]
