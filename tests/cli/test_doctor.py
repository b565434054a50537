import json
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from cli.command_line import status_of
from doctor.records import cpu_machine, gpu, gpu_machine, run, step
from outsize.cli import doctor_command
from outsize.cli.text.console import Output
from outsize.config import Config
from outsize.config.load import dump_config
from outsize.doctor.run_record import read_run
from outsize.training import loop, short_runs
from outsize.training.short_runs import ShortRun, Turns
from support import make_run


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


doctor = partial(status_of, "doctor")


def written(directory, machine):
    path = directory / "machine.json"
    path.write_text(machine.to_json())
    return path


def test_words(directory, capsys):
    machine = written(directory, gpu_machine(directory, gpus=(gpu(pcie_lanes=8), gpu(1))))
    assert doctor("--machine", machine) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "warning: cuda:0 (Example GPU) is linked by x8"
    assert "  gain      up to 50% of the time on the link" in lines
    assert any(line.startswith("1 warning; ") for line in lines)
    assert any(line.startswith("  a run directory: outsize doctor RUN (") for line in lines)


def test_json_is_one_object(directory, capsys):
    run(directory / "run", stall_s={"host": 0.8})
    machine = written(directory, cpu_machine(directory))
    assert doctor("run", "--machine", machine, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    (first,) = told["findings"]
    assert (first["id"], first["severity"]) == ("optimizer-bound", "warning")
    assert first["gain_share"] == pytest.approx(0.4)
    assert first.keys() >= {"evidence", "expected", "causes", "fix", "gain", "verify"}
    # A CPU has no link to GPUs and no allocator on one; one run is no sweep.
    assert {entry["id"] for entry in told["not_judged"]} == {"step-superlinear"}


def test_runs_beside_it_are_a_sweep(directory, capsys):
    run(directory / "large", seconds=4.0)
    run(directory / "small", tokens=2048, seconds=1.0)
    assert doctor("large", "--beside", "small", "--fail-on", "warning") == 1
    assert capsys.readouterr().out.startswith("limited by compute\n\nwarning: ")
    assert doctor("--beside", "small") == 2
    assert "name that one first" in capsys.readouterr().err


@pytest.mark.parametrize(("limit", "status"), [("error", 0), ("warning", 1), ("never", 0)])
def test_the_status_is_for_ci(directory, limit, status):
    run(directory / "run", stall_s={"host": 0.8})
    assert doctor("run", "--fail-on", limit) == status


def test_an_error_fails_by_default(directory):
    machine = written(
        directory, gpu_machine(directory, gpus=(gpu(clock_limits="hardware thermal slowdown"), gpu(1)))
    )
    assert doctor("--machine", machine) == 1
    assert doctor("--machine", machine, "--fail-on", "never") == 0


def test_a_sound_run_passes(directory, capsys):
    run(directory / "run", [step(number) for number in range(1, 10)])
    assert doctor("run", "--fail-on", "warning") == 0
    assert capsys.readouterr().out.startswith("limited by compute\n\ngood: ")


def test_mistakes_are_told(directory, capsys):
    assert doctor("absent") == 2
    assert "name the directory of a run" in capsys.readouterr().err
    assert doctor("--machine", "absent.json", "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"] == "ConfigError"
    assert doctor("--fail-on", "sometimes") == 2


def test_without_a_record_the_machine_is_probed(directory, monkeypatch, capsys):
    asked = []

    def stand_in(effort, directories, *, announce):
        asked.append(effort.mode)
        announce("host memory and optimizer", 0, 4)
        return cpu_machine(directory)

    monkeypatch.setattr("outsize.probing.run_probe.probe", stand_in)
    assert doctor() == 0
    streams = capsys.readouterr()
    assert asked == ["quick"]
    assert "probing: host memory" in streams.err
    assert streams.out.startswith("no findings; ")


def test_a_run_is_judged_without_torch(directory):
    run(directory / "run")
    command = (
        "import sys\nfrom outsize.cli import main\n"
        "try:\n    main(['doctor', 'run'])\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def short(seconds: float, tokens: int = 64) -> ShortRun:
    return ShortRun(
        tokens_per_step=tokens,
        step_s=seconds,
        tokens_per_s=tokens / seconds,
        memory_bytes=dict.fromkeys(("device", "host", "disk"), 0),
    )


def trainable(directory, **record):
    """A record of a run whose configuration can be trained."""
    config = make_run(directory)
    run(directory / "run", **record)
    (directory / "run" / "config.yaml").write_text(dump_config(config))


def test_a_remedy_is_tried_before_and_after_by_turns(directory, capsys):
    trainable(directory, plan={"microbatches": 2}, stall_s={"dispatch": 0.8})
    before = sorted(directory.rglob("*"))
    asked = ("run", "--try", "--steps", 2, "--turns", 2, "--json")
    assert doctor(*asked) == 0
    finding, trial = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert finding["findings"][0]["remedies"][0]["setting"] == "train.microbatches=1"
    assert trial["trial"]["settings"] == ["train.microbatches=1"]
    for name, microbatches in (("before", 2), ("after", 1)):
        turns = trial["trial"][name]
        assert [turn["microbatches"] for turn in turns] == [microbatches] * 2
        assert all(turn["step_s"] > 0 for turn in turns)
    assert sorted(directory.rglob("*")) == before
    assert doctor("run", "--try", "--steps", 2, "--turns", 2, "--set", "train.tokens_per_step=32") == 0
    said = capsys.readouterr().out
    assert "tried train.tokens_per_step=32: 2 turns of 2 steps without and with it" in said
    assert {"before", "after"} <= {line.split(" ")[0] for line in said.splitlines()}


def test_a_starved_loader_is_tried_with_more_threads_and_the_next_fix_beside_them(
    directory, capsys, monkeypatch
):
    """Batches of a trial are made as a run makes them; what helped stays for the next trial."""
    made: list[tuple[int, int]] = []

    class Counted(loop.Prefetcher):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            made.append((settings["num_workers"], settings["depth"]))
            super().__init__(*arguments, **settings)

    monkeypatch.setattr(loop, "Prefetcher", Counted)
    trainable(directory, data_s=1.24, stall_s={"up:w0": 1.24})
    assert doctor("run", "--try", "--steps", 2, "--turns", 2) == 0
    assert made == [(1, 2), (3, 4)] * 2
    said = capsys.readouterr().out
    assert "data.workers: 3 instead of 1, with data.prefetch: 4: a batch takes 2.0 s to make" in said
    assert "tried data.workers=3 data.prefetch=4: 2 turns of 2 steps" in said
    tried: list[tuple[int, int]] = []

    def by_turns(before: Config, after: Config, *_: Any) -> Turns:
        tried.append((before.data.workers, after.train.microbatches or 0))
        return Turns(before=(short(1.0),) * 2, after=(short(0.5 if len(tried) == 1 else 2.0),) * 2)

    monkeypatch.setattr(short_runs, "by_turns", by_turns)
    trainable(directory, plan={"microbatches": 2}, data_s=1.0, stall_s={"dispatch": 1.5})
    assert doctor("run", "--try") == 0
    assert tried == [(1, 2), (2, 1)]
    assert "to keep: --set data.workers=2 --set data.prefetch=3" in capsys.readouterr().out
    tried.clear()
    trials = [["data.workers=2"], ["data.workers=2"], ["data.workers=none"]]
    doctor_command.tried(read_run(directory / "run"), trials, 2, 2, Output(as_json=False))
    told = capsys.readouterr()
    assert told.err.count("not tried") == 2
    assert "to keep: --set data.workers=2\n" in told.out


def test_what_changes_the_training_is_tried_by_name_only(directory, capsys):
    trainable(directory, stall_s={"host": 0.8}, plan={"microbatches": 1})
    assert doctor("run", "--try") == 2
    said = capsys.readouterr().err
    assert "what may help changes the training: train.tokens_per_step=128" in said
    assert "--try --set train.tokens_per_step=128" in said


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--try",), "--try with a run: outsize doctor RUN --try"),
        (("run", "--set", "memory.prefetch=2"), "go with --try"),
        (("run", "--steps", "5"), "go with --try"),
        (("run", "--try"), "no finding has a setting for its remedy; name one"),
        (("run", "--try", "--set", "train.save_every=2"), "a trial saves and measures nothing"),
        (("run", "--try", "--set", "train.microbatches=2"), "the run was made with it already"),
        (("run", "--try", "--set", "memory.device_memory=1KiB"), "after: the smallest plan needs"),
        (("ranks", "--try"), "the run had several"),
        (("bare", "--try", "--set", "memory.prefetch=2"), "bare holds none"),
    ],
)
def test_what_cannot_be_tried_says_why(directory, capsys, asked, said):
    trainable(directory)
    run(directory / "ranks", about={"num_ranks": 2})
    run(directory / "bare")
    (directory / "bare" / "config.yaml").unlink()
    assert doctor(*asked) == 2
    assert said in capsys.readouterr().err


def test_a_difference_within_that_between_turns_is_none():
    slow, fast = (short(1.0), short(1.2)), (short(0.5), short(0.6))
    assert Turns(before=slow, after=fast).is_clear
    assert Turns(before=slow, after=fast).gain == pytest.approx(0.5)
    assert Turns(before=fast, after=slow).gain == pytest.approx(-1.0)
    assert not Turns(before=(short(1.0), short(1.2)), after=(short(0.9), short(1.1))).is_clear
    assert Turns(before=(short(1.0),) * 2, after=(short(1.0, 128),) * 2).gain == pytest.approx(0.5)
