from pathlib import Path

import huggingface_hub
import pytest

from outsize.checkpoint.files.checkpoint_files import locate_checkpoint
from outsize.errors import CheckpointError


def test_a_directory_is_its_own_place(tmp_path: Path):
    assert locate_checkpoint(str(tmp_path)) == tmp_path


def test_a_file_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a file; weights are read from the directory"):
        locate_checkpoint(tmp_path / "config.json")


def test_a_hub_id_is_the_local_copy_without_pickled_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def snapshot_download(name: str, allow_patterns: list[str], revision: str | None = None) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate_checkpoint("someone/model") == tmp_path
    assert asked["name"] == "someone/model"
    pickled = [pattern for pattern in asked["patterns"] if pattern.endswith((".bin", ".pt"))]
    assert pickled == ["adapter_model.bin"]  # read as tensors alone


def test_what_the_hub_does_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def snapshot_download(name: str, allow_patterns: list[str], revision: str | None = None) -> str:
        raise OSError("no network\nmuch more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match=r"hub does not hand out such a model: no network$"):
        locate_checkpoint("nobody/nothing")


def test_a_path_that_is_not_there_is_no_name_of_the_hub(tmp_path: Path):
    (tmp_path / "model").mkdir()
    with pytest.raises(
        CheckpointError, match=r"modle \(there is .*/model\), nor is that an id of the hub, OWNER/NAME$"
    ):
        locate_checkpoint(tmp_path / "modle")
