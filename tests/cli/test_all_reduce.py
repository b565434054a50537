import json
from functools import partial
from pathlib import Path

import pytest

from cli.command_line import LLAMA, status_of
from doctor.records import cpu_machine, sums
from outsize.hardware import machine_file
from outsize.probing import several_gpus as module

run = partial(status_of, "all-reduce")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """What is asked of the measurement, which gives round numbers instead."""
    calls = []

    def stand_in(num_ranks: int, bytes_max: int, *, backend: str):
        calls.append((num_ranks, bytes_max, backend))
        return sums(2e9, backend)

    monkeypatch.setattr(module, "measure_all_reduce", stand_in)
    return calls


def test_two_ranks_of_this_machine_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--ranks", 2, "--bytes-max", "16KiB", "--output", tmp_path / "sums.json", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["num_bytes"] for point in told["points"]] == [2**power for power in range(10, 15)]
    assert json.loads((tmp_path / "sums.json").read_text()) == told


def test_the_table_names_sizes_and_the_line_through_them(asked, capsys: pytest.CaptureFixture[str]):
    assert run("--ranks", 3) == 0
    assert asked == [(3, 64 * 2**20, "gloo")]
    out = capsys.readouterr().out
    assert "64.00 MiB" in out
    assert "gloo, 2 ranks: 10.0 us + 2.00 GB/s on each link, each way; off by 0% on held-out sizes" in out


def test_the_planner_takes_the_rate_from_the_file(asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert run("--output", tmp_path / "sums.json") == 0
    ask = partial(
        status_of,
        "plan",
        tmp_path / "config.json",
        "--gpus",
        "1x4090",
        "--ram",
        "64GB",
        "--nodes",
        2,
        "--json",
        "--net",
    )
    capsys.readouterr()
    told = []
    for net in (tmp_path / "sums.json", "2GB"):
        assert ask(net) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["step_s"] == pytest.approx(told[1]["step_s"], rel=1e-6)
    (tmp_path / "other.json").write_text("[]")
    assert ask(tmp_path / "other.json") != 0
    assert "outsize all-reduce --output" in capsys.readouterr().err


def test_rates_take_their_place_in_the_file_of_a_probe(asked, tmp_path: Path):
    path = tmp_path / "machine.json"
    before = cpu_machine(tmp_path / "root")
    path.write_text(before.to_json())
    assert run("--output", path) == 0
    assert machine_file.read(path) == before.model_copy(update={"all_reduce": sums(2e9, "gloo")})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "nccl", "--ranks", 64), "64 ranks of a machine with"),
        (("--output", "nowhere/sums.json"), "no such directory"),
        (("--bytes-max", "many"), "many"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments: tuple[object, ...], message: str, asked, capsys: pytest.CaptureFixture[str]
):
    assert run(*arguments) == 2
    assert message in capsys.readouterr().err
    assert asked == []


def test_nothing_measured_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    nothing = sums(2e9).model_copy(update={"points": (), "fit": None, "note": "torchrun: no such backend"})
    monkeypatch.setattr(module, "measure_all_reduce", lambda *_, **__: nothing)
    assert run() == 2
    assert "no sum over ranks was measured: torchrun: no such backend" in capsys.readouterr().err


def test_ranks_sum_through_their_devices_where_each_has_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "device_backend", lambda: "xccl")
    assert module.ranks_and_backend(None, num_devices=4, num_cpus=16) == (4, "xccl")
    assert module.ranks_and_backend(8, num_devices=4, num_cpus=16) == (8, "gloo")
    assert module.ranks_and_backend(None, num_devices=1, num_cpus=2) == (2, "gloo")
    monkeypatch.setattr(module, "device_backend", lambda: "")
    assert module.ranks_and_backend(2, num_devices=2, num_cpus=2) == (2, "gloo")


def test_an_estimate_asks_nothing_of_the_machine(asked, capsys: pytest.CaptureFixture[str]):
    """Of 14 GB over 8 ranks a ring moves 24.5 GB over each link, as the lesson on interconnects has it."""
    assert run("--estimate", "14GB", "--ranks", 8, "--json") == 0
    links = {row["link"]: row for row in json.loads(capsys.readouterr().out)["links"]}
    assert not asked
    for row in links.values():
        assert row["ring"] == pytest.approx(24.5e9 / row["bytes_per_s"], rel=1e-2)
        assert row["ring"] < row["tree"] < row["naive"]
    assert links["PCIe 4 x16"]["ring"] > 10 * links["NVLink 4"]["ring"]
    assert run("--estimate", "1GB", "--rate", "25GB") == 0
    assert "25.00 GB/s" in capsys.readouterr().out
    assert run("--rate", "25GB") == 2
    assert "add --estimate" in capsys.readouterr().err
