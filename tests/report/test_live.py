"""A run that is watched: its page and its data, to this machine, and nothing else."""

import http.client
import json
import threading

import pytest

from outsize import local_server
from outsize.errors import StorageError
from outsize.reporting import collect
from outsize.reporting.collect import LiveRun, LiveServer
from patience import PATIENCE_S
from report.browser import CHROMIUM, Browser
from report.recorded import line, make_run


@pytest.fixture
def served(tmp_path):
    with LiveServer(LiveRun(make_run(tmp_path / "run", 3), every_s=0.0)) as server:
        yield tmp_path / "run", server


def ask(server, path="/data.json", method="GET", **headers):
    _, _, address = server.url.rstrip("/").rpartition("/")
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def test_the_page_and_its_data_are_served(served):
    _, server = served
    answer, page = ask(server, "/")
    assert (answer.status, page[:15]) == (200, b"<!doctype html>")
    assert b"connect-src 'self'" in page
    answer, data = ask(server)
    assert answer.status == 200
    assert json.loads(data)["runs"][0]["status"]["done"] == 3
    assert answer.getheader("X-Content-Type-Options") == "nosniff"


def test_data_change_with_the_run_and_are_not_sent_twice(served):
    run, server = served
    tag = ask(server)[0].getheader("ETag")
    answer, body = ask(server, **{"If-None-Match": tag})
    assert (answer.status, body) == (304, b"")
    with (run / "heartbeat.jsonl").open("a") as file:
        file.write(json.dumps(line(4)) + "\n")
    answer, body = ask(server, **{"If-None-Match": tag})
    assert answer.status == 200
    assert json.loads(body)["runs"][0]["status"]["done"] == 4


@pytest.mark.parametrize(
    "path", ["/../config.yaml", "/config.yaml", "//etc/passwd", "/%2e%2e/x", "/data.json/x", "/x"]
)
def test_no_path_leads_anywhere_else(served, path):
    _, server = served
    assert ask(server, path)[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_written(served, method):
    _, server = served
    assert ask(server, "/", method)[0].status == 405


@pytest.mark.parametrize("host", ["example.com", "evil.example:80", ""])
def test_another_name_for_this_machine_is_refused(served, host):
    """A page from elsewhere may let its own name point here; then the browser sends that name."""
    _, server = served
    answer, body = ask(server, Host=host)
    assert answer.status == 403
    assert b"loss" not in body


def test_it_listens_on_the_loopback_only(served):
    _, server = served
    assert server.url.startswith("http://127.0.0.1:")


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    tmp_path = tmp_path / "runs" / "none"  # which is not there
    with LiveServer(LiveRun(tmp_path, every_s=0.0)) as server:
        told = json.loads(ask(server)[1])
        assert told["runs"] == []
        assert "no run has begun there yet" in told["waiting"]
        make_run(tmp_path, 2)
        assert json.loads(ask(server)[1])["runs"][0]["status"]["done"] == 2
        make_run(tmp_path, 1)  # another run in its place
        assert json.loads(ask(server)[1])["runs"][0]["status"]["done"] == 1


def test_a_run_is_read_once_per_interval_however_many_look_on(tmp_path, monkeypatch):
    counted = []
    monkeypatch.setattr(collect, "collect", lambda *_: counted.append(1) or {"name": "run"})
    run = LiveRun(make_run(tmp_path / "run", 1), every_s=1000.0)
    threads = [threading.Thread(target=run.data) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counted) == 1


def test_too_many_at_a_time_are_told_so(served, monkeypatch):
    _, server = served
    monkeypatch.setattr(local_server, "MOST_REQUESTS", 0)
    assert ask(server)[0].status == 503


def test_a_port_that_is_taken_is_an_error_that_says_what_to_try(served, tmp_path):
    _, server = served
    port = int(server.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(StorageError, match="choose another --port"):
        LiveServer(LiveRun(tmp_path, 1.0), port)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_an_open_page_follows_the_run_and_keeps_what_was_typed(tmp_path):
    run = make_run(tmp_path / "run", 3)
    with LiveServer(LiveRun(run, every_s=0.1)) as server, Browser(tmp_path / "profile") as browser:
        browser.open(server.url)
        browser.run("document.querySelector('#timeline input').value = 'layers.1'")
        with (run / "heartbeat.jsonl").open("a") as file:
            file.write(json.dumps(line(4)) + "\n")
        seen = browser.run(
            """new Promise((done) => { const look = () => /step 4/.test(document.querySelector('.sub').textContent)
            ? done(document.querySelector('#timeline input').value) : requestAnimationFrame(look); look(); })"""
        )
        assert seen == "layers.1"
        others = [problem for problem in browser.problems if "data.json" not in problem]
        assert others == []
