"""Whether a checkpoint fits its disk is known before the run begins."""

from pathlib import Path
from typing import Any

import pytest

from outsize import files
from outsize.checkpoint import saver
from outsize.checkpoint.checkpoint_state import latest
from outsize.checkpoint.saver import checkpoint_bytes
from outsize.errors import StorageError
from outsize.functions import export
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.run import train
from support import make_run

HEADERS = 2**16


def with_free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(files, "free_bytes", lambda path: num_bytes)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"model": {"dtype": "bf16"}},
        {"optimizer": {"state": "int8"}},
        {"train": {"method": "lora"}},
        {"model": {"freeze": ("*embed_tokens*",)}},
    ],
    ids=["fp32", "bf16", "int8 moments", "adapters", "frozen"],
)
def test_the_size_of_a_checkpoint_is_that_of_the_one_written(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    config = make_run(tmp_path, **sections)
    planned = checkpoint_bytes(prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None))
    train(config)
    directory = latest(tmp_path / "run")
    assert directory is not None
    written = sum(path.stat().st_size for path in directory.rglob("*.safetensors"))
    assert planned <= written <= planned + HEADERS


def test_a_checkpoint_that_cannot_fit_ends_the_run_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path)
    with_free(monkeypatch, 1000)
    with pytest.raises(StorageError, match=r"a checkpoint of this run takes .*, and .* has 1000 B free"):
        train(config)
    assert not (tmp_path / "run" / "heartbeat.jsonl").exists()


def test_a_second_checkpoint_that_does_not_fit_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path, train={"save_every": 2})
    needed = checkpoint_bytes(prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None))
    said: list[str] = []
    with_free(monkeypatch, needed + 1)
    train(config, announce=said.append)
    assert len([line for line in said if "a second one does not fit beside the first" in line]) == 1


@pytest.mark.parametrize("method", ["full", "lora"])
def test_an_export_that_cannot_fit_is_refused_before_it_writes(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters are merged: what is written is the whole model."""
    train(make_run(tmp_path, train={"method": method, "steps": 1}))
    with_free(monkeypatch, 20_000)
    with pytest.raises(StorageError, match=r"out will take .*, and 19.53 KiB are free there"):
        export(tmp_path / "run", tmp_path / "out", merge=method == "lora")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("same_disk", [True, False])
def test_a_home_on_the_same_disk_is_counted_before_the_run_begins(
    same_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path if same_disk else Path("/dev/shm")
    config = make_run(tmp_path, memory={"home": "disk", "store_dir": str(store)})
    prepared = prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None)
    with_free(monkeypatch, checkpoint_bytes(prepared) + prepared.plan.total_bytes("disk") - 1)
    if same_disk:
        with pytest.raises(
            StorageError, match=r"and its home and activations, which come before it, .*store_dir on"
        ):
            train(config)
        assert not (tmp_path / "run" / "heartbeat.jsonl").exists()
    else:
        train(config)


def test_a_home_that_is_there_takes_its_room_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(tmp_path, memory={"home": "disk"})
    prepared = prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None)
    home = tmp_path / "run/store/home.bin"
    home.parent.mkdir(parents=True)
    home.write_bytes(b"x" * prepared.plan.total_bytes("disk"))
    with_free(monkeypatch, checkpoint_bytes(prepared))
    saver.check_room(prepared, config.train, tmp_path / "run", home, lambda _: None)


@pytest.mark.parametrize(("host", "fits"), [(None, False), ("another", True)])
def test_homes_of_ranks_on_one_disk_are_added_up(
    host: str | None, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that saves nothing raises what the first one raises, and names of the same disk elsewhere do not count."""
    config = make_run(tmp_path, memory={"home": "disk"})
    prepared = prepare(RunSpec.of(config, tmp_path / "run"), lambda _: None)
    saved, home = checkpoint_bytes(prepared), prepared.plan.total_bytes("disk")
    handed: list[Any] = []

    def check(rank: int, gather: saver.Gather) -> None:
        path = tmp_path / f"rank-{rank}" / "home.bin"
        saver.check_room(
            prepared, config.train, tmp_path, path, lambda _: None, saves=rank == 0, gather=gather
        )

    with_free(monkeypatch, saved + home)
    for rank in range(2):
        check(rank, lambda value: [value] if handed.append(value) is None else [])
    if host is not None:
        handed[1] = [[host, *each[1:]] for each in handed[1]]
    for rank in range(2):
        if fits:
            check(rank, lambda _: handed)
            continue
        with pytest.raises(StorageError, match=r"and homes and activations of 2 ranks, which come before it"):
            check(rank, lambda _: handed)
    handed = [[(*each[:4], 0, each[5]) for each in told] for told in handed]  # checkpoints go elsewhere
    with_free(monkeypatch, 2 * home - 1)
    if not fits:
        with pytest.raises(
            StorageError, match=r"^homes and activations of 2 ranks take .*store_dir on another disk"
        ):
            check(1, lambda _: handed)
