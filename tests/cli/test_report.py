import json
import signal

import pytest
from typer.testing import CliRunner

from outsize import files
from outsize.cli import server_commands as watching
from outsize.cli.app import app
from outsize.reporting.html_page import write_page
from report.recorded import make_run


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_a_report_lies_in_the_run_and_its_bottleneck_is_printed(tmp_path):
    run = make_run(tmp_path / "first", 5)
    done = invoke(run)
    assert done.exit_code == 0, done.output
    assert "first: limited by the link between host and device: 28% of a step" in done.stdout
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert not list(run.glob("*.partial"))


def test_two_processes_may_write_a_report_at_once(tmp_path, monkeypatch):
    path, pids = tmp_path / "report.html", iter((1, 2))
    monkeypatch.setattr(files.os, "getpid", lambda: next(pids))

    class Slow(files.System):
        """Before the first page is there, another process has written one."""

        def rename(self, source, target):
            with files.replaced(files.System()):
                write_page(path, "of the other")
            super().rename(source, target)

    with files.replaced(Slow()):
        write_page(path, "of this one")
    assert path.read_text() == "of this one"
    assert list(tmp_path.iterdir()) == [path]


def test_two_runs_make_one_page_and_json_tells_what_is_in_it(tmp_path):
    first, second = make_run(tmp_path / "first", 5), make_run(tmp_path / "second", 5)
    done = invoke(first, second, "--json")
    told = json.loads(done.stdout)
    assert told["path"] == str(first / "compare-second.html")
    assert told["bytes"] == (first / "compare-second.html").stat().st_size
    assert [run["name"] for run in told["runs"]] == ["first", "second"]
    assert told["runs"][0]["verdict"]["bottleneck"]["id"] == "link-bound"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "name the directory of a run"),
        (["first", "-o", "nowhere/page.html"], "name another place"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "first", 2)
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert message in done.output
    assert not list(tmp_path.glob("**/*.html"))


def test_a_run_may_be_watched_before_it_begins(tmp_path, monkeypatch):
    # A service manager, or a container that stops, ends it as Ctrl-C does.
    monkeypatch.setattr(watching.signal, "pause", lambda: signal.raise_signal(signal.SIGTERM))
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["watch", str(tmp_path / "file")])
    assert refused.exit_code == 2
    assert "not a directory" in refused.output
    told = CliRunner().invoke(app, ["watch", str(tmp_path / "none")])
    assert "http://127.0.0.1:" in told.output
    assert f"no run has begun in {tmp_path / 'none'} yet" in told.output.replace("\n", "")
