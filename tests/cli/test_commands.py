import io
import json
import math
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from rich.console import Console

from cli.command_line import status_of
from outsize.cli import main
from outsize.cli.text.console import Progress, describe
from outsize.cli.text.options import FLAGS
from outsize.config.messages import all_keys
from outsize.errors import InfeasiblePlanError, NonFiniteError
from outsize.training.records import StepRecord, TrainResult, VerifyResult

PATHS = ["--model", "m", "--data", "d"]


def record(step=1, **changes):
    values = {"step": step, "loss": 2.5, "lr": 1e-4, "grad_norm": 0.75, "tokens": 1000, "seconds": 2.0}
    return StepRecord(**{"num_steps": 4} | values | changes)


def train_result(**changes):
    values = {
        "steps": 2,
        "loss": 2.25,
        "tokens_per_s": 500.0,
        "peak_rss_bytes": 2**28,
        "budget_bytes": 2**26,
        "stall_share": 0.125,
        "bytes_read": 3 * 2**20,
        "bytes_written": 2**20,
        "run_dir": "runs/x",
    }
    return TrainResult(**values | changes)


class Backend:
    """Stands in for what the commands call, and keeps what they were called with."""

    def __init__(self):
        self.calls = []
        self.error = None
        self.equal = True
        self.steps_done = None

    def train(self, config, *, progress=None, announce=print):
        self.calls.append(config)
        announce("data: 3 text files")
        if self.error is not None:
            raise self.error
        sys.stdout.write("a library that prints\n")
        told = {"num_steps": config.train.steps}
        progress(record(1, stall_share=0.25, stall_owner="read", bytes_up=2 * 10**9, **told))
        progress(record(2, loss=math.nan, skipped=True, **told))
        steps = config.train.steps
        return train_result(stall_owner="read", steps=self.steps_done or steps, num_steps=steps)

    def foresee(self, config, announce):
        self.calls.append(config)
        announce("note: a setting has no effect")
        return SimpleNamespace(
            plan=SimpleNamespace(plan_id="0" * 64, table="slots 4", to_dict=lambda: {"slots": 4}),
            forecast=SimpleNamespace(step_s=1.5),
            config=config,
            headline="train all of m",
        )

    def verify(self, config, announce=print):
        self.calls.append(config)
        announce("note: a setting has no effect")
        return VerifyResult(
            equal=self.equal,
            steps=1,
            loss_streamed=[2.5],
            loss_resident=[2.5 if self.equal else 2.75],
            max_weight_difference=0.0 if self.equal else 1e-3,
            differing=[] if self.equal else ["model.norm.weight"],
        )

    def write_export(self, source, target, *, merge=False, trust_remote_code=False, base=None, ready=None):
        assert not merge
        assert base is None
        assert ready is None
        assert not trust_remote_code
        self.calls.append((source, target))
        return target


@pytest.fixture
def backend(monkeypatch):
    """Modules of `outsize.training`, `objectives` and `checkpoint` that need no model and no torch."""
    import outsize.checkpoint
    import outsize.objectives
    import outsize.training

    fake = Backend()
    recipes = {"training_of": lambda config: fake.train, "objective_of": lambda config: None}
    parts = (
        (outsize.objectives, "recipes", recipes),
        (outsize.training, "run", {"train": fake.train}),
        (outsize.training, "forecast", {"foresee": fake.foresee}),
        (outsize.training, "short_runs", {"verify": fake.verify}),
        (outsize.checkpoint, "export", {"write_export": fake.write_export}),
    )
    for room, name, functions in parts:
        module = ModuleType(f"{room.__name__}.{name}")
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(room, name, module, raising=False)
    return fake


def test_train_prints_a_line_per_step_and_the_result(backend, capsys):
    assert status_of("train", *PATHS, "--steps", "2") == 0
    out, err = capsys.readouterr()
    assert "step 1/2  loss 2.5000  2.0 s left\n" in err
    assert "data: 3 text files" in err
    assert "2 steps, loss 2.2500 in the last" in out
    assert "waited" not in out
    assert status_of("train", *PATHS, "--steps", "2", "--verbose") == 0
    out, err = capsys.readouterr()
    assert "2.0 s left  500 trained tokens/s  waits   0%" in err
    assert "500 trained tokens/s\n" in out
    assert "waited for bytes 12.5% of the time (mostly for read)" in out


def test_train_with_json_prints_one_object_and_nothing_else_on_stdout(backend, capsys):
    assert status_of("train", *PATHS, "--json") == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    result = json.loads(line)
    assert result["run_dir"] == "runs/x"
    assert {"loss", "tokens_per_s", "peak_rss_bytes", "budget_bytes", "stall_share"} < result.keys()
    assert {"bytes_read", "bytes_written", "steps"} < result.keys()
    assert "a library that prints" in err
    assert "step   1/100" in err


def test_every_flag_sets_its_key(backend):
    values = {int: "2", float: "0.5"}
    special = {
        "--tokens-per-step": "8",
        "--device": "emulated:3",
        "--device-memory": "64MiB",
        "--host-memory": "64MiB",
        "--home": "disk",
        "--dtype": "bf16",
        "--method": "lora",
        "--resume": "auto",
        "--seq-len": "4",
        "--pack": "none",
    }
    arguments, expected = [], {}
    for flag, key, kind, _ in FLAGS:
        if flag == "--batch-size":  # in the place of --tokens-per-step
            continue
        text = special.get(flag, values.get(kind, "x"))
        arguments += [flag, text]
        expected[key] = kind(text)
    assert status_of("train", *arguments) == 0
    config = backend.calls[0].model_dump()
    found = {key: config[key.partition(".")[0]][key.partition(".")[2]] for key in expected}
    sizes = {"memory.device_memory": 64 * 2**20, "memory.host_memory": 64 * 2**20}
    assert found == expected | sizes
    assert status_of("train", *PATHS, "--batch-size", "3", "--seq-len", "4") == 0
    assert backend.calls[-1].tokens_per_step == 12


def test_flags_name_keys_that_exist():
    assert {key for _, key, _, _ in FLAGS} <= set(all_keys())


def test_a_config_file_and_set_reach_what_has_no_flag(backend, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {path: d, glob: '*.py'}\ntrain: {steps: 3}\n")
    assert (
        status_of("train", str(file), "--set", "memory.slots=3", "--set", "optimizer.lr=1e-3", "--steps", "4")
        == 0
    )
    (config,) = backend.calls
    assert (config.data.glob, config.memory.slots, config.optimizer.lr) == ("*.py", 3, 1e-3)
    assert config.train.steps == 4


def test_dry_run_prints_the_plan_and_trains_nothing(backend, capsys):
    assert status_of("train", *PATHS, "--dry-run", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["plan"] == {"slots": 4}
    assert status_of("verify", *PATHS, "--dry-run") == 0
    config, plan, would = capsys.readouterr().out.split("\n\n")
    assert plan.startswith("slots 4\n")
    assert plan.splitlines()[-1].split() == ["predicted", "step", "1.5", "s"]
    assert yaml.safe_load(config)["model"]["path"] == "m"
    assert would == "would train all of m\n"


@pytest.mark.parametrize("command", [["verify"], ["train", "--dry-run"]])
def test_notes_go_to_stderr(backend, capsys, command):
    assert status_of(*command, *PATHS, "--json") == 0
    assert "note: a setting has no effect" in capsys.readouterr().err


def test_verify_prints_both_losses_and_the_verdict(backend, capsys):
    assert status_of("verify", *PATHS) == 0
    out = capsys.readouterr().out
    assert "2.5" in out
    assert out.endswith("equal, bit for bit\n")


def test_verify_fails_with_status_1_where_runs_differ(backend, capsys):
    backend.equal = False
    assert status_of("verify", *PATHS) == 1
    out = capsys.readouterr().out
    assert "differs" in out
    assert "model.norm.weight" in out
    assert out.endswith("NOT EQUAL\n")
    assert status_of("verify", *PATHS, "--json") == 1
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["equal"] is False
    assert found.keys() >= {"steps", "loss_streamed", "loss_resident", "max_weight_difference"}


def test_export_writes_next_to_the_run_unless_told_where(backend, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("outsize.checkpoint.checkpoint_state.exported", lambda run: run / "step-00000001")
    assert status_of("export", str(tmp_path)) == 0
    assert backend.calls[0] == (tmp_path / "step-00000001", tmp_path / "export")
    assert status_of("export", str(tmp_path), "--out", str(tmp_path / "m"), "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["model_dir"] == str(tmp_path / "m")


# --- errors -------------------------------------------------------------------------------------------------


def test_an_error_on_purpose_is_a_message_and_status_2(backend, capsys):
    backend.error = InfeasiblePlanError("three slots do not fit", {"device": 2**20})
    assert status_of("train", *PATHS) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "outsize: InfeasiblePlanError: three slots do not fit (short: device by 1.00 MiB)" in err
    assert "Traceback" not in err


def test_an_error_with_json_is_an_object_as_well(backend, capsys):
    backend.error = InfeasiblePlanError("three slots do not fit", {"device": 2**20})
    assert status_of("train", *PATHS, "--json") == 2
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert (found["error"], found["short_by"]) == ("InfeasiblePlanError", {"device": 2**20})


def test_the_next_call_after_an_error_works(backend):
    backend.error = NonFiniteError("loss is NaN")
    assert status_of("train", *PATHS) == 2
    backend.error = None
    assert status_of("train", *PATHS) == 0


def test_ctrl_c_ends_with_status_130(backend, capsys):
    backend.error = KeyboardInterrupt()
    assert status_of("train", *PATHS) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_run_that_ends_early_says_how_to_go_on(backend, capsys):
    backend.steps_done = 3
    assert status_of("train", *PATHS, "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["steps"] == 3
    assert "outsize train runs/x/config.yaml --resume auto --run-dir runs/x goes on from here" in err


def test_a_bug_keeps_its_traceback(backend):
    backend.error = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError):
        main(["train", *PATHS])


def test_a_wrong_configuration_names_the_key(backend, capsys):
    assert status_of("train", *PATHS, "--set", "train.stepz=3") == 2
    assert "ConfigError: train.stepz: no such key; did you mean train.steps?" in capsys.readouterr().err
    assert status_of("train", *PATHS, "--device-memory", "lots") == 2
    assert "memory.device_memory: not a size: 'lots'" in capsys.readouterr().err
    assert status_of("train", "--data", "d") == 2
    assert "model.path: is required; pass --model DIR" in capsys.readouterr().err
    assert backend.calls == []


@pytest.mark.parametrize(
    "arguments", [["trian"], ["train", "--stepz", "3"], ["train", "--steps", "ten"], ["export"]]
)
def test_usage_errors_have_status_2(arguments, capsys):
    assert status_of(*arguments) == 2
    assert "Error" in capsys.readouterr().err


def test_version(capsys):
    import outsize

    assert status_of("--version") == 0
    assert capsys.readouterr().out == f"outsize {outsize.__version__}\n"


# --- the live line ------------------------------------------------------------------------------------------


def test_a_step_is_one_line_that_says_where_it_is_and_what_it_waits_for():
    step = record(
        7,
        num_steps=100,
        epoch=0.4213,
        bytes_up=2 * 10**9,
        bytes_down=10**9,
        stall_share=0.031,
        stall_owner="read",
        idle_s={"compute:w0": 0.62, "compute:w1": 0.1},
        waits_s={"compute:w0": {"loader": {"none": 0.02}, "weights": {"up:w0": 0.5, "read": 0.1}}},
    )
    line = describe(step, 93.0)
    assert line == "step   7/100  loss 2.5000  93.0 s left"
    assert describe(step, 93.0, verbose=True) == (
        f"{line}  epoch 0.42  500 trained tokens/s  waits  31%, mostly for weights to arrive  "
        "lr 1.00e-04  norm 0.750  in 1.00 GB/s  out 500.00 MB/s  stall   3.1% read"
    )
    later = describe(replace(step, step=9, waits_s={}), 93.0, step, verbose=True)
    assert "waits  31%, mostly for weights to arrive (step 7)  " in later
    assert describe(record(7, skipped=True), 0.0).endswith("left  skipped: not finite")


def test_a_terminal_shows_one_line_that_is_rewritten():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=200, highlight=False)
    with Progress(console) as progress:
        progress.say("data: 3 text files")
        progress.update(record(1))
        progress.update(record(2))
    text = written.getvalue()
    assert "4.0 s left" in text
    assert text.index("data: 3 text files") < text.index("step 1/4") < text.index("step 2/4")
    assert "\x1b[2K" in text  # erases the line before writing the next


def test_a_narrow_terminal_keeps_it_to_one_line():
    written = io.StringIO()
    with Progress(Console(file=written, force_terminal=True, width=40), verbose=True) as progress:
        progress.update(record(1))
    assert "…" in written.getvalue()


def test_a_log_file_gets_a_line_per_step():
    written = io.StringIO()
    with Progress(Console(file=written, soft_wrap=True)) as progress:
        progress.update(record(1))
        progress.update(record(2))
    assert len(written.getvalue().splitlines()) == 2
    assert "\x1b" not in written.getvalue()
