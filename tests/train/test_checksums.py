"""A bit of a saved model that flips is noticed by whoever reads the model, before anything is made of it."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import outsize
from crash.faults import Layer, layered
from outsize.checkpoint.checkpoint_state import latest
from outsize.cli import main
from outsize.errors import CheckpointError
from outsize.functions import export
from outsize.training.run import train
from outsize.training.short_runs import verify
from tiny import tiny_run


@pytest.fixture(scope="module", params=["full", "lora"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended, of a model or of adapters."""
    root = tmp_path_factory.mktemp(request.param)
    train(tiny_run(root, train={"steps": 1, "method": request.param}, memory={"home": "host"}))
    return root / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def begin(saved: Path, how: Callable[..., object]) -> None:
    root = saved.parents[2]
    method = "lora" if (saved / "adapter_config.json").is_file() else "full"
    place = {"path": str(saved)}
    how(tiny_run(root, model=place, train={"steps": 1, "method": method, "run_dir": str(root / "new")}))


READERS: dict[str, Callable[[Path], object]] = {
    "load": lambda saved: outsize.unwrap(
        outsize.load(saved, trainable=False, device="cpu", device_memory="64MiB")
    ),
    "train": lambda saved: begin(saved, train),
    "verify": lambda saved: begin(saved, verify),
    "export": lambda saved: export(saved.parents[1], saved.parents[2] / "exported"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_flipped_bit_of_saved_weights_is_refused(reader: str, run: Path) -> None:
    saved = latest(run)
    assert saved is not None
    weights = sorted(saved.glob("*.safetensors"))[-1]
    flip(weights)
    with pytest.raises(CheckpointError, match=f"{weights.name} is damaged"):
        READERS[reader](saved)
    assert not (run.parent / "exported").exists()


def test_a_flipped_bit_of_a_base_is_refused_by_a_run_that_goes_on(tmp_path: Path) -> None:
    """Adapters are in the checkpoint; the weights below them are read where the run began."""
    train(tiny_run(tmp_path, train={"steps": 1}))
    base = latest(tmp_path / "run")
    assert base is not None

    def adapt(steps: int) -> None:
        place = {"steps": steps, "method": "lora", "resume": "auto", "run_dir": str(tmp_path / "adapted")}
        train(tiny_run(tmp_path, model={"path": str(base)}, train=place))

    adapt(1)
    flip(max(base.glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="is damaged"):
        adapt(2)


@pytest.mark.parametrize("command", ["generate --prompt a", "score --data DATA --out OUT", "serve --port 0"])
def test_a_flipped_bit_of_saved_weights_ends_a_command(
    command: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = latest(run)
    assert saved is not None
    flip(sorted(saved.glob("*.safetensors"))[0])
    data = run.parent / "data.txt"
    data.write_text("a text")
    name, *more = command.replace("DATA", str(data)).replace("OUT", str(run.parent / "out.jsonl")).split()
    with pytest.raises(SystemExit, match="2"):
        main([name, str(run), *more, "--device", "cpu", "--device-memory", "64MiB"])
    assert "is damaged: its bytes are not those written" in capsys.readouterr().err


def test_weights_that_others_have_written_are_taken_as_they_are(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has noted what they were; where the note is there and broken, that is said."""
    saved = latest(run)
    assert saved is not None
    (saved / "trainer_state.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        READERS["load"](saved)
    assert f"{saved} is not held against its checksums" in caplog.text


def test_a_text_that_was_edited_is_said_where_it_is_read_and_refused_with_a_way_where_it_is_copied(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = latest(run)
    assert saved is not None
    name = "adapter_config.json" if (saved / "adapter_config.json").is_file() else "config.json"
    edited = json.loads((saved / name).read_text())
    (saved / name).write_text(json.dumps(edited))
    with caplog.at_level(logging.WARNING):
        READERS["load"](saved)
    assert f"{saved / name} is truncated" in caplog.text
    with pytest.raises(CheckpointError, match=r"if it was changed on purpose, .* copy it"):
        READERS["export"](saved)
    place = shutil.copytree(saved, run.parent / "copy")  # the way that it names
    (place / "trainer_state.json").unlink()
    READERS["load"](place)


def test_an_export_reads_weights_once(run: Path) -> None:
    saved = latest(run)
    assert saved is not None
    with layered(Layer(run.parent)) as layer:
        READERS["export"](saved)
    shards = {path.name: path.stat().st_size for path in saved.glob("model-*.safetensors")}
    for name, size in shards.items():
        reads = [o for o in layer.operations if o.kind == "pread" and o.path.name == name]
        ends = [o for o in reads if o.offset + o.moved == size]  # small ones are read with their headers
        assert len(ends) == 1 or size < 20_000, name
