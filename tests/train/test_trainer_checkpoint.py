"""A run that the Hugging Face Trainer began goes on here, with weights, moments and steps; and no code of it runs."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.records import StepRecord
from outsize.training.run import train
from outsize.training.run_data import open_dataset
from support import make_run

BEFORE, STEPS = 2, 4
SEQUENCES = 4


class InOrder(Trainer):
    """Takes the rows as they come."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def run_of(directory: Path, name: str = "llama", **train_section: Any) -> Config:
    return make_run(
        directory,
        name,
        data={"seq_len": 16},
        train={"steps": STEPS, "microbatches": 1, "loss": "model", **train_section},
    )


def rows_of(config: Config, directory: Path) -> list[dict[str, Tensor]]:
    """The sequences of a run, in its order."""
    prepared = prepare(RunSpec.of(config, directory), lambda _: None)
    with open_dataset(config, prepared, directory, lambda _: None) as dataset:
        batches = [dataset.batch(step, SEQUENCES) for step in range(STEPS)]
    return [
        {"input_ids": ids, "labels": labels}
        for batch in batches
        for ids, labels in zip(batch.input_ids.clone(), batch.labels.clone(), strict=True)
    ]


def begin(config: Config, directory: Path, rows: list[dict[str, Tensor]], **changes: Any) -> Path:
    """Train the first steps with the Trainer, and return its checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    optimizer = config.optimizer
    arguments = {
        "output_dir": str(directory),
        "max_steps": BEFORE,
        "per_device_train_batch_size": SEQUENCES,
        "learning_rate": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "lr_scheduler_type": "constant",
        "save_steps": 1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "optim": "adamw_torch_fused",
        **changes,
    }
    InOrder(model=model, args=TrainingArguments(**arguments), train_dataset=rows).train()
    return directory / f"checkpoint-{BEFORE}"


def go_on(config: Config, checkpoint: Path, rows: list[dict[str, Tensor]]) -> list[float]:
    """The plain loop: torch's optimizer with the state as it was saved, and the steps that are left."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    model.train()
    decaying = set(Trainer.get_decay_parameter_names(None, model))
    named = list(model.named_parameters())
    groups = [[p for n, p in named if (n in decaying) is decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    losses = []
    for step in range(BEFORE, STEPS):
        part = rows[step * SEQUENCES : (step + 1) * SEQUENCES]
        batch = {key: torch.stack([row[key] for row in part]) for key in part[0]}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def resume(config: Config, path: Path, run_dir: Path, said: list[str] | None = None) -> list[StepRecord]:
    records: list[StepRecord] = []
    changes = {"resume": str(path), "run_dir": str(run_dir)}
    resumed = config.model_copy(update={"train": config.train.model_copy(update=changes)})
    train(resumed, progress=records.append, announce=([] if said is None else said).append)
    return records


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_run_of_the_trainer_goes_on_as_a_plain_loop_does(name: str, tmp_path: Path) -> None:
    """gpt2 ties its embeddings and has biases, which do not decay: numbers and names are far apart."""
    config = run_of(tmp_path, name)
    rows = rows_of(config, tmp_path / "rows")
    checkpoint = begin(config, tmp_path / "theirs", rows)
    said: list[str] = []
    records = resume(config, tmp_path / "theirs", tmp_path / "ours", said)  # its newest checkpoint
    assert [record.step for record in records] == [3, 4]
    assert [record.loss for record in records] == go_on(config, checkpoint, rows)
    assert f"resumed from {checkpoint.name}" in said
    assert not [line for line in said if "learning rate" in line]
    state = json.loads((tmp_path / "ours/checkpoints/step-00000004/trainer_state.json").read_text())
    assert set(state["updates"].values()) == {4}
    # and from there as any other run
    ended = train(run_of(tmp_path, name, steps=5, resume="auto", run_dir=str(tmp_path / "ours")))
    assert ended.steps == 5


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    directory = tmp_path_factory.mktemp("begun")
    config = run_of(directory)
    return config, begin(config, directory / "theirs", rows_of(config, directory / "rows"))


def test_its_moments_are_not_kept_in_fewer_bits(begun: tuple[Config, Path], tmp_path: Path) -> None:
    config, checkpoint = begun
    optimizer = config.optimizer.model_copy(update={"state": "int8"})
    with pytest.raises(ConfigError, match=r"are fp32, not int8; resume with optimizer\.state=fp32"):
        resume(config.model_copy(update={"optimizer": optimizer}), checkpoint, tmp_path / "ours")


def test_its_moments_are_those_of_no_other_optimizer(begun: tuple[Config, Path], tmp_path: Path) -> None:
    config, checkpoint = begun
    sgd = config.optimizer.model_copy(update={"name": "SGD"})
    with pytest.raises(
        ConfigError, match=r"moments of a Trainer's AdamW, not of SGD; resume with optimizer\.name"
    ):
        resume(config.model_copy(update={"optimizer": sgd}), checkpoint, tmp_path / "ours")


def test_another_learning_rate_is_taken_and_said(begun: tuple[Config, Path], tmp_path: Path) -> None:
    config, checkpoint = begun
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": 5e-4})})
    said: list[str] = []
    resume(changed, checkpoint, tmp_path / "run", said)
    assert any("with a learning rate of 0.001, this run does with 0.0005" in line for line in said)


def test_other_settings_of_adamw_are_taken_and_said(begun: tuple[Config, Path], tmp_path: Path) -> None:
    config, checkpoint = begun
    settings = config.optimizer.model_copy(update={"weight_decay": 0.25, "betas": (0.9, 0.95)})
    said: list[str] = []
    resume(config.model_copy(update={"optimizer": settings}), checkpoint, tmp_path / "run", said)
    assert [line for line in said if line.startswith(f"note: {checkpoint.name}")] == [
        f"note: {checkpoint.name}: betas was (0.9, 0.999), and is (0.9, 0.95) from here on: optimizer.betas",
        f"note: {checkpoint.name}: weight_decay was 0.1, and is 0.25 from here on: optimizer.weight_decay",
    ]


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


def changed_state(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "optimizer.pt"
        state = torch.load(path, weights_only=True)
        torch.save(change(state) or state, path)

    return damage


def each(state: Any, change: Callable[[dict[str, Any]], None]) -> None:
    for entry in state["state"].values():
        change(entry)


def of_json(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / "trainer_state.json"
        state = json.loads(path.read_text())
        change(state)
        path.write_text(json.dumps(state))

    return damage


def sgd(entry: dict[str, Any]) -> None:
    entry["momentum_buffer"] = entry.pop("exp_avg")
    del entry["exp_avg_sq"]


def flip(directory: Path) -> None:
    """One bit of a moment."""
    path = directory / "optimizer.pt"
    data = bytearray(path.read_bytes())
    moment = next(iter(torch.load(path, weights_only=True)["state"].values()))["exp_avg"]
    at = data.index(moment.numpy().tobytes())
    data[at + 7] ^= 16
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "no optimizer": (lambda d: (d / "optimizer.pt").unlink(), r"optimizer\.pt is missing, .*model\.path="),
    "no scheduler": (lambda d: (d / "scheduler.pt").unlink(), r"scheduler\.pt is missing"),
    "code": (lambda d: torch.save(Evil(), d / "optimizer.pt"), "holds more than tensors and numbers"),
    "rubbish": (
        lambda d: (d / "optimizer.pt").write_bytes(b"PK\3\4 rubbish"),
        "it is damaged or not torch's",
    ),
    "truncated": (lambda d: os.truncate(d / "optimizer.pt", 3000), "it is damaged or not torch's"),
    "flipped": (flip, r"optimizer\.pt is damaged: .* is not as it was written"),
    "no state": (changed_state(lambda s: {"x": 1}), "does not hold the state of an optimizer"),
    "SGD": (changed_state(lambda s: each(s, sgd)), "is not AdamW's: it keeps step, momentum_buffer for"),
    "Adam": (
        changed_state(lambda s: s["param_groups"][0].update(decoupled_weight_decay=False)),
        "settings are not AdamW's",
    ),
    "amsgrad": (
        changed_state(lambda s: s["param_groups"][0].update(amsgrad=True)),
        "settings are not AdamW's",
    ),
    "transposed": (
        changed_state(lambda s: each(s, lambda e: e.update(exp_avg=torch.zeros(3, 5)))),
        r"exp_avg of .* is \(3, 5\), not .*model\.freeze",
    ),
    "NaN": (
        changed_state(lambda s: each(s, lambda e: e["exp_avg"].fill_(float("nan")))),
        "exp_avg of .* holds what is no number",
    ),
    "negative squares": (
        changed_state(lambda s: each(s, lambda e: e["exp_avg_sq"].fill_(-1.0))),
        "exp_avg_sq of .* holds what is no number",
    ),
    "one too few": (
        changed_state(lambda s: s["param_groups"][1].update(params=s["param_groups"][1]["params"][1:])),
        r"is of \d+ trained parameters",
    ),
    "no step": (changed_state(lambda s: each(s, lambda e: e.update(step=0.5))), "not a whole number"),
    "another step": (of_json(lambda s: s.update(global_step=7)), "not a scheduler's after step 7"),
    "no count": (of_json(lambda s: s.update(global_step="x")), "cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_cannot_be_gone_on_with_is_refused_and_nothing_is_run(
    case: str, begun: tuple[Config, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, checkpoint = begun
    damage, match = DAMAGE[case]
    copy = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name))
    damage(copy)
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": 9})})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=match):
        resume(longer, copy, tmp_path / "run")
    assert not (tmp_path / "executed").exists()
