import json

from outsize.planner.simulate.simulator import Event, Timeline
from outsize.reporting.html_page import to_chrome

TIMELINE = Timeline(
    (
        Event(lane="write", op="WRITE 0#0<t0", start_s=7.0, end_s=7.5),
        Event(lane="up:w0", op="LOAD 0@w0.0", start_s=5.0, end_s=6.0),
        Event(
            lane="compute:w0",
            op="F 0.0@w0",
            start_s=6.0,
            end_s=6.25,
            waited_s=0.5,
            waited_for="LOAD 0@w0.0",
        ),
    )
)


def test_there_is_one_named_row_for_each_lane_compute_first():
    trace = json.loads(to_chrome(TIMELINE))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert names == {0: "compute:w0", 1: "up:w0", 2: "write"}
    order = {e["tid"]: e["args"]["sort_index"] for e in trace if e["name"] == "thread_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2}


def test_times_are_microseconds_from_the_first_event():
    ops = {e["name"]: e for e in json.loads(to_chrome(TIMELINE))["traceEvents"] if e["ph"] == "X"}
    assert (ops["LOAD 0@w0.0"]["ts"], ops["LOAD 0@w0.0"]["dur"]) == (0.0, 1e6)
    assert (ops["F 0.0@w0"]["ts"], ops["F 0.0@w0"]["dur"]) == (1e6, 0.25e6)
    assert ops["F 0.0@w0"]["args"] == {"waited_us": 0.5e6, "waited_for": "LOAD 0@w0.0"}
    assert ops["WRITE 0#0<t0"]["cat"] == "WRITE"


def test_a_trace_is_json_even_if_it_is_empty():
    assert json.loads(to_chrome(TIMELINE))["displayTimeUnit"] == "ms"
    assert json.loads(to_chrome(Timeline(())))["traceEvents"] == []
