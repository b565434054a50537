"""Runs whose steps hold documents of like length."""

from pathlib import Path
from typing import Any

import pytest

from outsize.config import Config
from outsize.errors import ConfigError
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import assert_same_end, in_dir
from train.test_document_packing import run_over_documents


def grouped_run(directory: Path, **sections: Any) -> Config:
    config = run_over_documents(directory, **sections)
    data = config.data.model_copy(update={"pack": "none", "group_by_length": True})
    return config.model_copy(update={"data": data})


@pytest.mark.parametrize(
    "memory",
    [{}, {"device": "emulated:2", "home": "disk", "activations": "offload-products"}],
    ids=["one", "workers"],
)
def test_streamed_is_resident(memory: dict[str, Any], tmp_path: Path):
    assert verify(grouped_run(tmp_path, memory=memory, train={"steps": 3})).equal


def test_a_run_goes_on_in_the_middle_of_an_epoch_and_says_what_is_saved(tmp_path: Path):
    config = grouped_run(tmp_path)
    said: list[str] = []
    train(in_dir(config, tmp_path / "whole"), announce=said.append)
    assert any("tokens for each document it would be" in line for line in said)
    train(in_dir(config, tmp_path / "parts", steps=2))
    train(in_dir(config, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")
    other = config.model_copy(update={"data": config.data.model_copy(update={"group_by_length": False})})
    with pytest.raises(ConfigError, match=r"data.group_by_length=True, not False"):
        train(in_dir(other, tmp_path / "parts", resume="auto"))


def test_compiled_blocks_have_one_length():
    with pytest.raises(ValueError, match=r"model.compile: blocks goes with data.group_by_length: false"):
        Config(
            model={"path": "m", "compile": "blocks"},
            data={"path": "d", "pack": "none", "group_by_length": True},
        )
