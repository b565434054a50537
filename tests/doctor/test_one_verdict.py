"""Whatever a run has recorded: all who tell of it name the same bottleneck, and advise nothing that cannot be done."""

import functools
import json
import re
import tempfile
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.command_line import status_of
from doctor.records import GIB, cpu_machine, gpu_machine, host, told
from outsize.cli.train_command import _verdict
from outsize.doctor.examine import examine
from outsize.doctor.run_record import KEPT_LINES, Facts, read_run
from outsize.reporting.collect import collect
from report.recorded import line, make_run

pytestmark = pytest.mark.hypothesis

CAUSES = {
    "weights": "up:w0",
    "gradients": "down:w0",
    "disk": "read",
    "optimizer": "host",
    "loader": "none",
    "workers": "compute:w1",
    "python": "none",
    "checkpoint": "store",
}
# What a fix may say, and where it cannot be done: (its words, who the run is that must not read them).
IMPOSSIBLE = [
    (r"train\.microbatches: 0\b", lambda run: True),
    (r"train\.microbatches: (\d+) instead of \1\b", lambda run: True),
    (r"fewer.*microbatches|microbatches down", lambda run: run["microbatches"] == 1),
    (
        r"transport\.weights",
        lambda run: run["codec"] != "raw" or run["home"] == "disk" or run["device"] == "cpu",
    ),
    (r"memory\.home: host", lambda run: run["home"] == "host" or run["state_bytes"] > 8 * GIB),
    (r"memory\.home: disk", lambda run: run["home"] == "disk"),
    (r"memory\.store_dir", lambda run: run["home"] == "host"),
    (r"larger memory\.device_memory", lambda run: run["device_memory"] is None),
    (r"less recomputation", lambda run: not run["recomputes"]),
    (r"fewer workers", lambda run: run["workers"] == 1),
    (r"train\.save_every", lambda run: not run["save_every"]),
    (r"^nothing", lambda run: run["trouble"]),
]


@st.composite
def runs(draw):
    shares = draw(st.lists(st.floats(0, 1), min_size=len(CAUSES), max_size=len(CAUSES)))
    idle = draw(st.floats(0, 0.95))
    scale = idle / max(sum(shares), 1e-9)
    workers, home = draw(st.sampled_from([1, 2])), draw(st.sampled_from(["host", "disk"]))
    return {
        "waits": {
            cause: {owner: s * scale} for (cause, owner), s in zip(CAUSES.items(), shares, strict=True)
        },
        "mfu": draw(st.sampled_from([None, 0.01, 0.1, 0.5])),
        "tokens_per_microbatch": draw(st.sampled_from([4, 4096])),
        "microbatches": draw(st.sampled_from([1, 2, 3, 16])),
        "workers": workers,
        "home": home,
        "device": draw(st.sampled_from(["cpu", f"emulated:{workers}", "cuda:0"])),
        "codec": draw(st.sampled_from(["raw", "auto", "lossless3"])),
        "device_memory": draw(st.sampled_from([None, "1GiB"])),
        "recomputes": draw(st.booleans()),
        "state_bytes": draw(st.sampled_from([GIB, 9 * GIB])),
        "save_every": draw(st.sampled_from([0, 5])),
        "host": draw(
            st.sampled_from(
                [
                    None,
                    host(),
                    host(queued_s=4.0, others_cpu_s=6.0),
                    host(throttled_s=4.0),
                    host(swapped_in_bytes=GIB, memory_pressure_s=1.2),
                ]
            )
        ),
        "count": draw(st.sampled_from([1, 3, 14])),
        "repeats": draw(st.integers(0, 3)),
        "slow_step": draw(st.sampled_from([1.2, 90.0])),
    }


def recorded(directory, machine, run):
    """Write a run as it would have left its directory, one that went on after a crash included."""
    changes = {"waits": run["waits"], "mfu": run["mfu"], "host": run["host"], "device_bytes": {}}
    directory.mkdir()
    numbers = [*range(1, run["count"] + 1), *range(run["count"] - run["repeats"] + 1, run["count"] + 1)]
    steps = [line(max(1, n), **changes, seconds=run["slow_step"] if n % 11 == 5 else 1.2) for n in numbers]
    (directory / "heartbeat.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    plan = {
        "below": "host",
        "memory_bytes": {"device": {"slots": GIB}, "host": {"home": GIB}, "disk": {}},
        "program": ["LOAD 0@w0.0"] * 40,
        "bytes_per_step": {"up": 20 * 10**9},
        "home": run["home"],
        "microbatches": run["microbatches"],
        "workers": run["workers"],
        "home_bytes": {"weights": run["state_bytes"]},
        "activations": [{"recompute": 2} if run["recomputes"] else {"keep": 2}],
        "transport": {"weights": run["codec"].replace("auto", "raw")},
    }
    config = {
        "model": {"attention": "auto"},
        "train": {k: run[k] for k in ("microbatches", "save_every")} | {"tokens_per_step": 4096},
        "memory": {"device": run["device"], "device_memory": run["device_memory"], "home": "auto"},
        "transport": {"weights": run["codec"]},
    }
    about = told(machine) | {
        "device": run["device"],
        "tokens_per_microbatch": run["tokens_per_microbatch"],
        "steps": 5000,
    }
    for name, content in {"plan.json": plan, "config.yaml": config, "run.json": about}.items():
        (directory / name).write_text(json.dumps(content))
    return directory


@functools.cache
def machines():
    """The machine of all runs, and another one that was probed."""
    with tempfile.TemporaryDirectory() as path:
        return cpu_machine(Path(path) / "own"), gpu_machine(Path(path) / "probed")


@settings(max_examples=40)
@given(runs())
def test_all_name_the_same_bottleneck_and_nothing_impossible(run):
    machine, probed = machines()
    with tempfile.TemporaryDirectory() as path:
        directory = recorded(Path(path) / "run", machine, run)
        page = collect(directory)["verdict"]
        doctor = examine(Facts(recorded=read_run(directory)))
        with_machine = examine(Facts(recorded=read_run(directory), probed=probed))
    assert page["bottleneck"]["id"] == doctor.bottleneck.id == with_machine.bottleneck.id
    assert page["bottleneck"]["limits"] == doctor.bottleneck.limits
    assert [f["fix"] for f in page["findings"]] == [f.fix for f in doctor.findings]
    for report in (doctor, with_machine):
        trouble = [f.id for f in report.findings if f.severity in ("error", "warning")]
        # What limits a run is told first; where it is good, nothing is wrong.
        assert report.findings[0].id == report.bottleneck.id or report.bottleneck.severity == "info"
        assert not (trouble and any(f.severity == "good" for f in report.findings))
        for finding in report.findings:
            assert finding.fix
            for words, is_impossible in IMPOSSIBLE:
                said = re.search(words, finding.fix)
                assert not (said and is_impossible({**run, "trouble": trouble})), (finding.id, finding.fix)


def test_of_a_long_run_all_judge_the_same_steps(tmp_path):
    """A run that waited for the disk, and waits for the link since it went on after a crash."""
    directory = make_run(tmp_path / "run", 40, waits={"disk": {"read": 0.9}})
    with (directory / "heartbeat.jsonl").open("a") as file:
        file.writelines(json.dumps(line(n)) + "\n" for n in range(21, KEPT_LINES + 21))
    doctor = examine(Facts(recorded=read_run(directory)))
    assert doctor.bottleneck.id == "link-bound"
    assert json.loads(json.dumps(asdict(doctor))) == json.loads(json.dumps(collect(directory)["verdict"]))


def test_report_doctor_and_the_summary_of_a_run_print_it(tmp_path, capsys):
    directory = make_run(tmp_path / "run", 10, waits={"disk": {"read": 0.4}})
    assert status_of("doctor", directory) == 0
    assert capsys.readouterr().out.startswith("limited by the disk\n")
    assert status_of("report", directory) == 0
    assert "run: limited by the disk: 40% of a step" in capsys.readouterr().out
    assert _verdict(directory)[0].startswith("limited by the disk: 40% of a step")
    assert _verdict(tmp_path / "none") == []
