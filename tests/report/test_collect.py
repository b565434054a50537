"""What a page is told of a run, and that any state of a run directory makes a page."""

import json

import pytest

from outsize.errors import ConfigError
from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.simulator import Event, Timeline, unit_latencies
from outsize.reporting import collect as collecting
from outsize.reporting.collect import collect
from outsize.reporting.html_page import make_page, page_data, to_json
from report.recorded import UNITS, line, make_run, timeline


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "first", 10)


def test_figures_are_those_of_the_run(recorded):
    run = collect(recorded)
    figures = run["figures"]
    assert run["name"] == "first"
    assert (run["status"]["done"], run["status"]["total"], run["status"]["state"]) == (10, 10, "finished")
    assert figures["last_loss"] == line(10)["loss"]
    # Step 7 was interrupted: it is not typical.
    assert figures["tokens_per_s"] == pytest.approx(16384 / 1.2, rel=0.05)
    assert figures["compute_share"] == pytest.approx(0.64)
    assert run["curves"][0]["points"][0] == pytest.approx([1, line(1)["loss"]], rel=1e-4)
    assert run["machine"] == {"cpu": {"model": "Example 9950", "num_physical_cores": 16}}


def test_waits_are_ranked_and_the_bottleneck_is_named(recorded):
    run = collect(recorded)
    assert [(w["cause"], w["owner"]) for w in run["waits"]] == [
        ("weights", "up:w0"),
        ("optimizer", "host"),
        ("python", "none"),
    ]
    assert run["waits"][0]["share"] == pytest.approx(0.28)
    assert run["verdict"]["bottleneck"]["id"] == "link-bound"


def test_a_timeline_keeps_its_ops_lanes_and_units(recorded):
    told = collect(recorded)["timeline"]
    assert told["lanes"] == ["compute:w0", "up:w0", "down:w0", "host"]
    assert len(told["ops"]) == len(timeline().events)
    assert told["units"] == UNITS
    assert told["left_out"] == 0
    lane, start_us, length_us, text, *_ = told["ops"][0]
    assert (told["lanes"][lane], told["texts"][text], start_us, length_us) == (
        "up:w0",
        "LOAD 0@w0.0",
        0.0,
        30000.0,
    )


def test_each_unit_tells_where_its_time_went(recorded):
    rows = collect(recorded)["timeline"]["latencies"]
    assert [row["unit"] for row in rows] == UNITS
    first, second, head = rows[0], rows[1], rows[-1]
    assert first["load"] == pytest.approx(2 * 0.030)  # once for its forward, once for its backward
    assert first["forward"] == pytest.approx(4 * 0.004)
    assert first["backward"] == pytest.approx(4 * 0.013)
    assert (first["gradient"], first["optimizer"]) == pytest.approx((0.022, 0.018))
    assert second["waited"] > 0  # a load of 30 ms behind computation of 16 ms
    assert (head["forward"], head["backward"]) == (pytest.approx(4 * 0.013), 0)


def test_ops_that_nobody_knows_are_in_no_row():
    events = tuple(
        Event(lane="host", op=op_or_text(op), start_s=0.0, end_s=1.0) for op in ("THINK 3", "CLIP")
    )
    assert unit_latencies(events) == {}


def test_of_too_many_ops_the_shortest_are_left_out_and_counted(recorded, monkeypatch):
    monkeypatch.setattr(collecting, "MOST_OPS", 20)
    told = collect(recorded)["timeline"]
    assert len(told["ops"]) == 20
    assert told["left_out"] == len(timeline().events) - 20
    assert min(op[2] for op in told["ops"]) > 4000.0


def test_a_run_of_fifty_thousand_steps_is_a_small_page(tmp_path):
    run = collect(make_run(tmp_path / "long", 1010))
    assert run["downsampled"]
    assert all(len(curve["points"]) <= 1002 for curve in run["curves"])
    assert len(run["shares"]["steps"]) == 250
    # What grows with steps is bounded, so this is the size of 50,000 of them, too.
    assert len(make_page(page_data([run])).encode()) < 600_000


@pytest.mark.parametrize(
    "missing", ["plan.json", "run.json", "config.yaml", "timeline.json", "prediction.json"]
)
def test_a_file_that_is_not_there_leaves_its_section_out(missing, tmp_path):
    directory = make_run(tmp_path / "run", 4)
    (directory / missing).unlink()
    assert "<section" not in make_page(page_data([collect(directory)]))  # sections are made when it opens


def test_only_a_heartbeat_of_an_older_version_has_curves_and_no_verdict(tmp_path):
    (tmp_path / "heartbeat.jsonl").write_text(
        json.dumps({"schema": 1, "step": 1, "seconds": 1.0, "loss": 2.0}) + "\n"
    )
    run = collect(tmp_path)
    assert run["verdict"] == {"bottleneck": None, "findings": []}
    assert (run["waits"], run["timeline"], run["status"]["total"]) == ([], None, None)
    assert run["figures"]["last_loss"] == 2.0


@pytest.mark.parametrize("bad", ["timeline.json", "plan.json", "config.yaml"])
def test_a_damaged_file_is_an_error_that_names_it(bad, tmp_path):
    directory = make_run(tmp_path / "run", 2)
    (directory / bad).write_text("[1, 2")
    with pytest.raises(ConfigError, match=bad):
        collect(directory)


def test_a_trace_of_somebody_else_is_refused(tmp_path):
    directory = make_run(tmp_path / "run", 2)
    (directory / "timeline.json").write_text(json.dumps({"traceEvents": [{"ph": "X"}]}))
    with pytest.raises(ConfigError, match="not a timeline that outsize wrote"):
        collect(directory)


def test_before_the_first_step_has_ended_there_is_nothing_to_show(tmp_path):
    (tmp_path / "heartbeat.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no step has ended yet"):
        collect(tmp_path)


def test_no_text_of_a_run_leaves_its_place_in_the_page(tmp_path):
    directory = make_run(tmp_path / "run<script>", 2)
    (directory / "config.yaml").write_text(
        json.dumps({"model": {"path": "</script><img src=x onerror=alert(1)>"}})
    )
    page = make_page(page_data([collect(directory)]))
    assert page.count("</script>") == 2
    assert "<img" not in page
    assert "<title>run&lt;script&gt; · outsize</title>" in page


def test_a_page_forbids_every_connection_but_a_live_one_its_own_server(recorded):
    data = page_data([collect(recorded)])
    assert "connect-src 'none'" in make_page(data)
    assert "connect-src 'self'" in make_page(data, live=True)
    assert "http" not in make_page(data).replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_what_json_cannot_say_is_null():
    assert json.loads(to_json({"a": [float("nan"), {"b": float("inf")}]})) == {"a": [None, {"b": None}]}


def test_an_empty_timeline_is_none():
    assert collecting._timeline(Timeline(()), {}, {}) is None


def test_a_timeline_tells_where_each_round_begins():
    """With the first forward of any unit for one of its microbatches, whichever worker runs it."""
    ops = (
        "LOAD 0@w0.0",
        "F 0.0@w0",
        "FK 0.1@w1",
        "FB 1.0@w0",
        "B 0.0@w0",
        "F 0.2@w1",
        "F 0.3@w0",
        "SUM 1@w0.0",
    )
    events = (
        Event(lane="compute:w0", op=op_or_text(op), start_s=float(at), end_s=at + 1.0)
        for at, op in enumerate(ops, 1)
    )
    shown = Timeline(tuple(events))
    assert collecting._timeline(shown, {}, {"round_microbatches": 2})["rounds"] == [1e6, 5e6]
    assert collecting._timeline(shown, {}, {})["rounds"] == []
