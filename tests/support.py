"""What tests of whole runs share: a model directory, a configuration, batches, and a streamed run in this process."""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast

import zoo
from outsize.checkpoint.checkpoint_state import STATE, describe, latest
from outsize.checkpoint.saver import Saver
from outsize.config import Config
from outsize.data.batch import Batch
from outsize.model.split import Split
from outsize.planner.search.step_plan import Plan
from outsize.runtime.ops.compute_ops import seed_of
from outsize.session.job.prepare import Job, prepare
from outsize.session.run_state import Position
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from reference import Recipe, Reseed, Trace, train

SEQ_LEN = 12
TOO_MUCH = "1GiB"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(kw_only=True)
class Streamed(Trace):
    """A streamed run.

    Attributes:
        plan: that it followed.
        chunk_tokens: tokens per chunk of its loss; None for the model's own.
        skipped: whether each step was left out.
    """

    plan: Plan
    chunk_tokens: int | None
    skipped: list[bool] = field(default_factory=list)


def save_model(model: nn.Module, directory: Path) -> Path:
    """Write ``model`` as a Hugging Face directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory)
    return directory


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """One token per byte, and an end of text: no training, no files; ``special`` tokens come last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<eos>", *alphabet, *special.values()])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", **special)


def make_model_dir(directory: Path, name: str = "llama", **changes: Any) -> Path:
    """A model directory with a tokenizer: architecture ``name``, tiny, with random weights."""
    config = zoo.make_config(name)
    for key, value in {"vocab_size": 264, **changes}.items():
        setattr(config, key, value)
    factory = AutoModelForMaskedLM if zoo.is_masked(name) else AutoModelForCausalLM
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        save_model(factory.from_config(config, dtype=torch.float32), directory)
    make_tokenizer(**{"mask_token": "<mask>"} if zoo.is_masked(name) else {}).save_pretrained(directory)
    return directory


def make_text(path: Path, num_lines: int = 60) -> Path:
    """A text file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"line {number}: the square of {number} is {number * number}" for number in range(num_lines)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def make_run(directory: Path, name: str = "llama", **sections: Mapping[str, Any]) -> Config:
    """A complete run in ``directory``: 4 steps of 4 sequences in 2 microbatches, in fp32 on the CPU."""
    model = directory / "model"
    if not model.exists():
        make_model_dir(model, name)
    data = directory / "data.txt"
    if not data.exists():
        make_text(data)
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "dtype": "fp32"},
        "data": {"path": str(data), "seq_len": 16},
        "train": {
            "steps": 4,
            "tokens_per_step": 64,
            "microbatches": 2,
            "seed": 3,
            "run_dir": str(directory / "run"),
        },
        "optimizer": {"lr": 1e-3, "schedule": "constant", "max_grad_norm": 0.5, "weight_decay": 0.1},
        "memory": {"device": "cpu", "home": "host", "device_memory": TOO_MUCH, "host_memory": TOO_MUCH},
    }
    for section, values in sections.items():
        settings[section] = {**settings.get(section, {}), **values}
    return Config(**settings)


def in_dir(config: Config, run_dir: Path, **changes: Any) -> Config:
    train_config = config.train.model_copy(update={"run_dir": str(run_dir), **changes})
    return config.model_copy(update={"train": train_config})


def end_of(run_dir: Path) -> dict[str, Any]:
    """Everything that a run has saved last, but which run it was."""
    directory = latest(run_dir)
    assert directory is not None
    state = json.loads((directory / STATE).read_text())
    found: dict[str, Any] = {key: value for key, value in state.items() if key not in ("run", "crc32")}
    for path in sorted(directory.rglob("*.safetensors")):
        tensors = load_file(path)
        found.update({f"{path.relative_to(directory)}:{name}": t for name, t in tensors.items()})
    return found


def assert_same_end(one: Path, other: Path) -> None:
    ours, theirs = end_of(one), end_of(other)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        same = torch.equal(value, theirs[key]) if isinstance(value, torch.Tensor) else value == theirs[key]
        assert same, key


def make_config(model_dir: Path, batches: Sequence[Batch], **sections: Mapping[str, Any]) -> Config:
    """A run over ``batches`` in fp32 on the CPU, its home on the host; ``sections`` changes what should differ."""
    num_sequences, seq_len = batches[0].input_ids.shape
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_dir), "dtype": "fp32"},
        "data": {"path": "nothing", "seq_len": seq_len},
        "train": {
            "steps": len(batches),
            "tokens_per_step": seq_len * num_sequences,
            "loss": "model",
            "seed": 5,
        },
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.0},
        "memory": {"device": "cpu", "home": "host", "device_memory": TOO_MUCH, "host_memory": TOO_MUCH},
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    return Config(**settings)


def recipe_of(config: Config, **changes: Any) -> Recipe:
    """The same settings for the reference."""
    optimizer = config.optimizer
    settings: dict[str, Any] = {
        "steps": config.train.steps,
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "schedule": optimizer.schedule,
        "warmup_steps": config.warmup_steps,
        "freeze": config.model.freeze,
    }
    return Recipe(**{**settings, **changes})


def make_batches(
    name: str, num_steps: int = 3, num_sequences: int = 4, seq_len: int = SEQ_LEN
) -> list[Batch]:
    """Batches for architecture ``name``, another one for each step; some labels are masked."""
    return [
        Batch(**zoo.batch(name, seed=step, num_sequences=num_sequences, seq_len=seq_len))
        for step in range(num_steps)
    ]


def microbatches(batches: Sequence[Batch], count: int) -> list[list[dict[str, Tensor]]]:
    """Cut each batch as evenly as can be, the larger parts first: for each step the inputs of its microbatches."""
    cut = []
    for batch in batches:
        sizes = [len(part) for part in torch.arange(batch.num_sequences).tensor_split(count)]
        parts = {name: tensor.split(sizes) for name, tensor in batch.inputs.items()}
        cut.append([{name: pieces[m] for name, pieces in parts.items()} for m in range(count)])
    return cut


def run_streamed(config: Config, batches: Sequence[Batch], run_dir: Path) -> tuple[Streamed, Job]:
    """Train on ``batches``, streamed; gradients are copied as they leave the device."""
    prepared = prepare(RunSpec.of(config, run_dir), lambda _: None)
    trace = Streamed(plan=prepared.plan, chunk_tokens=prepared.chunk_tokens)
    seen: list[dict[str, Tensor]] = [{} for _ in batches]
    counts = dict.fromkeys(range(len(prepared.split.spec.units)), 0)

    def observe(unit: int, touched: frozenset[int], plane: Tensor) -> None:
        for position in touched:
            tensor = prepared.split.spec.units[unit].tensors[position]
            piece = plane[tensor.offset : tensor.offset + tensor.numel].clone().cpu()
            seen[counts[unit]][tensor.name] = piece.view(tensor.shape)
        counts[unit] += 1

    scales: list[float] = []

    def fed() -> Iterator[Batch]:
        for batch in batches:
            scales.append(trainer.loss_scale.value)
            yield batch

    with StreamedTrainer(prepared, run_dir / "store", observe) as trainer:
        trainer.fill()
        for outcome in trainer.steps(fed()):
            trace.losses.append(outcome.loss)
            trace.norms.append(outcome.gradient_norm)
            trace.skipped.append(outcome.skipped)
        trainer.settle()
        trace.weights = read_weights(trainer)
    trace.gradients = [
        {name: gradient / scale for name, gradient in step.items()}
        for step, scale in zip(seen, scales, strict=True)
    ]
    return trace, prepared


def train_resident(
    network: nn.Module, batches: Sequence[Batch], config: Config, device: str, **recipe: Any
) -> Trace:
    """Train on a device that holds the model as a whole; fp32 masters of ``network`` step in host memory.

    Args:
        network: what ``config.model.path`` was written from.
        batches: one for each step.
        config: of the streamed run.
        device: as torch calls it.
        recipe: what `recipe_of` is told beside.
    """
    masters = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=DTYPES[config.model.dtype])
    parts = [
        [{key: value.to(device) for key, value in part.items()} for part in step]
        for step in microbatches(batches, config.train.microbatches or 1)
    ]
    trace = train(model.to(device).train(), parts, recipe_of(config, **recipe), masters)
    trace.gradients = [{name: gradient.cpu() for name, gradient in step.items()} for step in trace.gradients]
    trace.weights = {name: weight.cpu() for name, weight in trace.weights.items()}
    return trace


def read_weights(trainer: StreamedTrainer, plane: str = "weights") -> dict[str, Tensor]:
    """One plane of all units of a settled trainer, by parameter name."""
    found: dict[str, Tensor] = {}
    for unit in trainer.spec.units:
        if unit.tensors and (plane == "weights" or unit.trainable):
            found.update({name: tensor.clone() for name, tensor in trainer.read_unit(unit, plane).items()})
    return found


def reseed_of(seed: int) -> Reseed:
    """Seed as a streamed run with ``train.seed`` does."""
    # torch.manual_seed keeps a stack trace for each kind of device that there is not, which takes 20 ms in a test.
    set_seed = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed

    def reseed(step: int, microbatch: int, unit: int, glue: bool) -> None:
        set_seed(seed_of(seed, step, unit, microbatch, glue))

    return reseed


def unit_names(split: Split) -> tuple[str, ...]:
    """Names of the streamed units' modules, in the order of the forward."""
    return tuple(unit.name for unit in split.spec.units if unit.kind != "rest")


def saver_of(trainer: StreamedTrainer, run_dir: Path, config: Config, **options: Any) -> Saver:
    """What writes the checkpoints of ``trainer``, as a run would have it."""

    def state_of(position: Position) -> dict[str, Any]:
        data = {"sequences_per_epoch": 10}
        return describe(position, config, trainer.spec.dtype, trainer.loss_scale, data, run="a run")

    settings = {"commits": False, "state_of": state_of, "announce": lambda _: None, **options}
    return Saver(trainer, run_dir, config.train, **settings)


def save(trainer: StreamedTrainer, run_dir: Path, position: Position, config: Config) -> Path:
    """Write a checkpoint of ``trainer`` and return its directory."""
    with saver_of(trainer, run_dir, config) as saver:
        saver.finish(position)
    directory = latest(run_dir)
    assert directory is not None
    return directory
