"""A tiny model, tokens to train on, and ways to run them badly: through the library and through the command."""

import hashlib
import io
import json
import re
import shutil
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from outsize.cli import main
from outsize.config import Config, dump_config
from outsize.config.load import parse_config
from outsize.errors import OutsizeError
from outsize.storage.record import has_commit
from outsize.training.records import TrainResult
from outsize.training.run import train
from support import save_model

STEPS = 3
SEQ_LEN = 12
NUM_TOKENS = 1000
WEIGHTS = "model.safetensors"
# What a run writes under another name first.
HALF_WRITTEN = ("*.partial*", ".writing*", "home.bin", "activations.bin")


def make_model(directory: Path, name: str = "llama") -> Path:
    """Write the tiny model called ``name``."""
    return save_model(zoo.build(name), directory)


def make_tokens(path: Path) -> Path:
    """Write token ids that any model of the zoo takes."""
    ids = np.random.default_rng(0).integers(zoo.FIRST_WORD, zoo.VOCAB_SIZE, NUM_TOKENS)
    np.save(path, ids.astype(np.uint16))
    return path


def change_weight(
    model: Path, value: float, name: str = "model.layers.1.mlp.up_proj.weight", position: int = 7
) -> None:
    """Set one element of a stored parameter."""
    tensors = load_file(model / WEIGHTS)
    tensors[name].view(-1)[position] = value
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


@dataclass(frozen=True)
class Outcome:
    """What a command came to."""

    status: int
    out: str
    err: str

    @property
    def result(self) -> dict[str, Any]:
        """The object on the last line of stdout."""
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found


def command(*arguments: str) -> Outcome:
    """Run a command of outsize in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as done:
        main(arguments)
    status = done.value.code or 0
    assert isinstance(status, int)
    return Outcome(status, out.getvalue(), err.getvalue())


class World:
    """Files of one test.

    Args:
        root: an empty directory.
        model: a model, only read.
        tokens: a data set, only read.
    """

    def __init__(self, root: Path, model: Path, tokens: Path) -> None:
        self.root = root
        self.model = model
        self.tokens = tokens

    def own_model(self, name: str = "model") -> Path:
        """Return a copy of the model to spoil."""
        return shutil.copytree(self.model, self.root / name)

    def config(self, run: str = "run", **sections: Mapping[str, Any]) -> Config:
        """Three steps from disk in two microbatches; ``sections`` changes what should differ."""
        settings: dict[str, dict[str, Any]] = {
            "model": {"path": str(self.model), "dtype": "fp32"},
            "data": {"path": str(self.tokens), "seq_len": SEQ_LEN},
            "train": {
                "steps": STEPS,
                "tokens_per_step": 4 * SEQ_LEN,
                "microbatches": 2,
                "run_dir": str(self.root / run),
                "seed": 5,
            },
            "optimizer": {"lr": 1e-3},
            "memory": {
                "device": "cpu",
                "home": "disk",
                "activations": "recompute",
                "device_memory": "64MiB",
                "host_memory": "64MiB",
                "disk_memory": "64MiB",
            },
        }
        for name, section in sections.items():
            settings[name] = {**settings.get(name, {}), **section}
        return parse_config(settings)

    def command(self, config: Config, *arguments: str, name: str = "train") -> Outcome:
        """Run ``outsize train FILE ARGUMENTS --json``."""
        file = self.root / "config-of-command.yaml"
        file.write_text(dump_config(config))
        return command(name, str(file), "--json", *arguments)

    def fails(
        self,
        kind: type[OutsizeError],
        match: str,
        *,
        begins: bool = False,
        tokenises: bool = False,
        **sections: Mapping[str, Any],
    ) -> OutsizeError:
        """Fail in the one way, twice: as a library call and as a command; return the error of the former.

        Args:
            kind: the error, exactly.
            match: pattern of its message.
            begins: whether the run gets as far as its first step; one that does not leaves nothing.
            tokenises: whether it may leave tokenised data, which is whole and ready for the next run.
            sections: as of `config`.
        """
        before, files = process_state(), names_below(self.root)
        with pytest.raises(kind, match=match) as caught:
            train(self.config("library", **sections))
        # What a layer raised is of its class as well.
        assert kind in (type(caught.value), type(caught.value).__base__)
        outcome = self.command(self.config("command", **sections))
        assert outcome.status == 2
        assert outcome.err.count("outsize: ") == 1
        assert f"outsize: {kind.__name__}: " in outcome.err
        assert "Traceback" not in outcome.err
        assert (outcome.result["error"], "Traceback" in outcome.out) == (kind.__name__, False)
        assert process_state() == before
        left = names_below(self.root) - files - {"config-of-command.yaml"}
        if tokenises:
            left = {name for name in left if not re.fullmatch("(library|command)(/data(/.*)?)?", name)}
        assert begins or not left
        assert not half_written(self.root)
        return caught.value

    def digest(self, run: str = "run") -> dict[str, str]:
        """Hash what a finished run has saved: weights, optimizer state, and the loss of each step.

        A step that was lost and trained again has a line each time; the last one counts.
        """
        run_dir = self.root / run
        checkpoint = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
        found = {
            str(path.relative_to(checkpoint)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in checkpoint.rglob("*.safetensors")
        }
        beats = [json.loads(line) for line in (run_dir / "heartbeat.jsonl").read_text().splitlines()]
        return found | {f"loss {beat['step']}": repr(beat["loss"]) for beat in beats}


def run_well(world: World, run: str = "run", **sections: Mapping[str, Any]) -> TrainResult:
    """Train, and check that the run ended where it should."""
    config = world.config(run, **sections)
    result = train(config)
    assert result.steps == config.train.steps
    return result


def process_state() -> tuple[object, ...]:
    """What a run must leave as it was in the process: torch's random numbers, its switches, its threads."""
    return (
        bytes(torch.get_rng_state().numpy()),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


def names_below(directory: Path) -> set[str]:
    """Every file and directory below ``directory``."""
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def half_written(directory: Path) -> list[Path]:
    """What should have been renamed or removed; a home with a commit in it stays for the run to go on."""
    found = (path for pattern in HALF_WRITTEN for path in directory.rglob(pattern))
    return [path for path in found if not has_commit(path)]
