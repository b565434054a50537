import json
from functools import partial

from cli.command_line import status_of

run = partial(status_of, "inspect")


def test_the_table_shows_equal_blocks_on_one_line(model_dir, capsys):
    assert run(model_dir) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["units", "kind", "name", "parameters", "weights", "(bf16)"]
    assert lines[2].split()[:3] == ["1-4", "block", "model.layers.0"]
    assert "41.1k each" in lines[2]
    assert any(line.startswith("LlamaForCausalLM: 230k parameters") for line in lines)


def test_json_has_every_unit(model_dir, capsys):
    assert run(model_dir / "config.json", "--dtype", "fp32", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert [unit["kind"] for unit in found["units"]] == ["embedding", *["block"] * 4, "head", "rest"]
    assert sum(unit["num_parameters"] for unit in found["units"]) == found["num_parameters"]
    assert found["training_state_bytes"] == 16 * found["num_parameters"]
    block = found["units"][1]
    assert block["weight_bytes"] >= 4 * block["num_parameters"]
    assert found["largest_unit_bytes"] == block["weight_bytes"]


def test_what_is_no_model_is_named(tmp_path, capsys):
    assert run(tmp_path) == 2
    assert "has no config.json" in capsys.readouterr().err
    assert run(tmp_path / "none") == 2
    assert "no such file or directory" in capsys.readouterr().err
