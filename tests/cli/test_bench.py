"""One row of what a machine does: the model is made for the budget, both runs are equal, and the row says so."""

import json
import shlex
from functools import partial
from pathlib import Path

import pytest
from typer.main import get_command

from cli.command_line import status_of
from outsize.cli.app import app
from outsize.cli.bench_command import LAYER_SQUARES, STATE_BY_BUDGET, STATE_BYTES, VOCABULARY, shape_for
from outsize.errors import ConfigError

run = partial(status_of, "bench")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "t4.ipynb"


def test_a_row_is_proof_and_figures(tmp_path, capsys):
    assert (
        run("--device", "emulated:1", "--device-memory", "28MiB", "--steps", 3, "-o", tmp_path / "row.json")
        == 0
    )
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row == json.loads((tmp_path / "row.json").read_text())
    assert row["equal"]
    assert (row["compared_steps"], row["largest_difference"]) == (3, 0.0)
    assert row["state_bytes"] == pytest.approx(2 * row["budget_bytes"], rel=0.1)
    assert row["tokens_per_s"] > 0
    assert row["predicted_from_calibration"] > 0
    assert row["predicted_from_data_sheet"] is None  # no card
    assert {"card", "drivers", "commit", "link", "memlock_bytes", "packages", "dtype"} <= row.keys()


@pytest.mark.parametrize("mib", [32, 96, 1024, 4096, 16384])
def test_the_state_is_twice_the_budget(mib):
    shape = shape_for(mib * 2**20)
    width = shape["hidden_size"]
    parameters = LAYER_SQUARES * width**2 * shape["num_hidden_layers"] + 2 * VOCABULARY * width
    assert STATE_BYTES * parameters == pytest.approx(STATE_BY_BUDGET * mib * 2**20, rel=0.15)


def test_a_budget_that_holds_no_model_is_refused():
    with pytest.raises(ConfigError, match="too little for a model"):
        shape_for(2**20)


def test_the_notebook_runs_a_command_that_there_is():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
    (command,) = [shlex.split(line[1:]) for line in lines if line.startswith("!outsize")]
    get_command(app).commands["bench"].make_context("bench", command[2:])  # type: ignore[attr-defined]
