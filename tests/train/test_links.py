"""What lies outside of a model's directory stays outside; where a link of the user's leads is where is written."""

import logging
from pathlib import Path

import pytest

from outsize.checkpoint.checkpoint_state import latest
from outsize.checkpoint.files.checkpoint_files import is_own_file
from outsize.functions import export
from outsize.training.records import StepRecord
from outsize.training.run import train
from tiny import tiny_model, tiny_run


def test_links_out_of_a_model_go_into_no_checkpoint_and_no_export(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    secret = tmp_path / "secret"
    secret.write_text("THE-SECRET")
    model = tiny_model(tmp_path / "model")
    (model / "tokenizer_notes.txt").symlink_to(secret)
    with caplog.at_level(logging.WARNING):
        train(tiny_run(tmp_path))
    assert "links to a file outside of the model's directory, and is not copied" in caplog.text
    saved = latest(tmp_path / "run")
    assert saved is not None
    (saved / "tokenizer_notes.txt").symlink_to(secret)
    exported = tmp_path / "exported"
    export(tmp_path / "run", exported)
    for directory in (saved, exported):
        assert (directory / "tokenizer.json").is_file()
        for path in directory.rglob("*"):
            assert path.is_symlink() or path.is_dir() or b"THE-SECRET" not in path.read_bytes()


def test_files_of_the_hubs_cache_are_links_and_its_own(tmp_path: Path):
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    blob = tmp_path / "models--a--b/blobs/abc"
    blob.parent.mkdir()
    blob.write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    assert is_own_file(snapshot / "tokenizer.json", snapshot)
    (snapshot / "other.json").symlink_to(tmp_path / "models--a--b/blobs/../../elsewhere")
    (tmp_path / "elsewhere").write_text("{}")
    assert not is_own_file(snapshot / "other.json", snapshot)


def test_an_export_through_a_link_writes_where_it_leads(tmp_path: Path):
    train(tiny_run(tmp_path))
    (tmp_path / "place").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "place")
    export(tmp_path / "run", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "place/config.json").is_file()


def test_other_arithmetic_is_told_on_a_resume(tmp_path: Path):
    train(tiny_run(tmp_path, train={"steps": 1}, memory={"home": "host"}))
    said: list[str] = []
    other = tiny_run(
        tmp_path,
        model={"attention": "eager"},
        train={"resume": "auto", "microbatches": 1},
        transport={"weights": "raw"},
        memory={"home": "host"},
    )
    train(other, announce=said.append)
    told = [line for line in said if "goes on with" in line]
    assert "note: the run goes on with train.microbatches=1, and had 2" in told
    assert any(line.startswith("note: the run goes on with model.attention=eager, and had ") for line in told)


def test_a_run_that_was_renamed_is_told_where_its_home_is(tmp_path: Path):
    config = tiny_run(tmp_path, train={"resume": "auto"}, memory={"store_dir": str(tmp_path / "homes")})
    stopped = tiny_run(
        tmp_path,
        train={"resume": "auto", "steps": 5},
        memory={"store_dir": str(tmp_path / "homes")},
    )

    def stop(record: StepRecord) -> None:
        if record.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(stopped, progress=stop)
    (tmp_path / "run").rename(tmp_path / "renamed")
    said: list[str] = []
    renamed = config.model_copy(
        update={"train": config.train.model_copy(update={"run_dir": str(tmp_path / "renamed")})}
    )
    train(renamed, announce=said.append)
    assert any("before, and its home is still" in line for line in said), said
