"""Sizes that no model has are one error that names them, in whatever way a config is read, and nothing is built."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from cli.command_line import status_of
from outsize.cli.plan.plan_model import read_config
from outsize.errors import CheckpointError, ModelError
from outsize.model.build import load_hf_config
from outsize.model.sizes.model_spec import check_sizes
from tiny import tiny_model

KEYS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "head_dim"),
)
IMPOSSIBLE = (
    -1,
    -(10**9),
    10**12,
    10**30,
    "64",
    "many",
    float("nan"),
    float("inf"),
    1.5,
    True,
    [],
    {},
    [2, -2],
)
READERS: tuple[Callable[[str], Any], ...] = (load_hf_config, read_config)


def config_with(directory: Path, **changes: Any) -> Path:
    """A config whose sizes are those of a tiny model but for ``changes``."""
    model = directory / "model"
    if not model.exists():
        tiny_model(model)
    path = directory / "config.json"
    sizes = json.loads((model / "config.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps({**sizes, **changes}), encoding="utf-8")
    return path


@pytest.mark.parametrize("read", READERS)
def test_each_size_that_cannot_be_is_refused_by_file_and_key(read: Callable[[str], Any], tmp_path: Path):
    for key in KEYS:
        for value in IMPOSSIBLE:
            path = config_with(tmp_path, **{key: value})
            with pytest.raises(
                ModelError, match=f"config.json: {key} is .*, and not a whole number"
            ) as error:
                read(str(path))
            assert len(str(error.value)) < 400 + len(str(path))


@pytest.mark.parametrize("command", ["inspect", "plan", "generate", "train"])
def test_commands_end_with_one_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = config_with(tmp_path, num_hidden_layers=10**12)
    directory = tmp_path / "model"
    path.rename(directory / "config.json")
    (tmp_path / "data.txt").write_text("words " * 99, encoding="utf-8")
    rest = {
        "inspect": (directory,),
        "plan": (directory,),
        "generate": (directory, "--prompt", "words"),
        "train": ("--model", directory, "--data", tmp_path / "data.txt", "--run-dir", tmp_path / "run"),
    }
    assert status_of(command, *rest[command]) == 2
    told = capsys.readouterr().err
    assert "num_hidden_layers is 1000000000000, and not a whole number from 1 to 10,000" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("read", READERS)
def test_a_config_of_too_many_brackets_is_no_traceback(read: Callable[[str], Any], tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 100_000, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read(str(path))


def test_sizes_of_parts_are_named_by_their_part():
    with pytest.raises(ModelError, match=r"text_config\.hidden_size is -4"):
        check_sizes({"text_config": {"hidden_size": -4}}, "config.json")


def test_the_sizes_that_transformers_has_for_each_language_model_are_taken():
    families = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    }
    checked = 0
    for family in sorted(families & set(CONFIG_MAPPING.keys())):
        try:
            config = CONFIG_MAPPING[family]()
        except StrictDataclassError:  # its own defaults do not make one
            continue
        check_sizes(config.to_dict(), family)
        checked += 1
    assert checked > 100
