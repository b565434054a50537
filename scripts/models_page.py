"""Write docs/models.md: kinds of models, each tried, tiny and at random weights, wrapped and plain. Takes minutes."""

import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import peft
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import outsize  # noqa: E402 - after the path is known
import zoo  # noqa: E402 - of the tests
import zoo_of_lists  # noqa: E402 - of the tests
import zoo_of_parts  # noqa: E402 - of the tests
from outsize.model.split import Split  # noqa: E402
from outsize.wrapped.module import runner_of  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
INTRODUCTION = """\
# Models

<!-- Written by `make models` from scripts/models_page.py; change it there. -->

No architecture is named in the code: layers of any lists can be streamed ([which](wrap.md#which-layers-are-streamed)).
These were tried, tiny and at random weights, in fp32, wrapped by `outsize.wrap` and plain: what the forward returns,
every gradient of a batch, five steps of AdamW (losses and all weights), and the same with LoRA on the linear layers
of what is streamed. *Equal* means bit for bit, *rounding* a difference of at most 1e-6 (after five steps 1e-4), and a
row that fails says why. The first four columns are of a model that fits; *recomputed* is the worst of all four in two
slots, where layers are loaded anew and recomputed, *two workers* on two. Plain models run with `use_cache=False`, as
wrapped ones do in training. *Streamed* is the share of the parameters that lies in streamed layers: of models this
small the ends weigh more than of real ones. Layers that are called several times stay on the device. The tests train
the language models as runs as well, over either home and in several microbatches.
Tried alike, outside of the table: ViT, ConvNeXt and EVA of timm, ViT of torchvision and ESM-2 of fair-esm (one
device), all equal; and two steps, recomputed, of 67 further architectures of transformers, all equal.
`outsize train` takes causal and masked language models ([which tokens are hidden](data.md#masked-language-models)),
and by its [objectives](objectives.md) classifiers, models without a head and encoder-decoders; other kinds train by
[`outsize.wrap`](wrap.md), in a loop of your own or under a trainer.

| model type | class | lists of layers | streamed | forward | gradients | five steps | LoRA | recomputed | two workers |
|---|---|---|--:|---|---|---|---|---|---|
"""
SMALL = {
    "hidden_size": 32,
    "d_model": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": zoo.VOCAB_SIZE,
}
IDS = torch.randint(3, zoo.VOCAB_SIZE, (2, 12), generator=torch.Generator().manual_seed(1))
PIXELS = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
CLASSES = torch.tensor([1, 0])
ROUNDING, AFTER_STEPS = 1e-6, 1e-4  # of a loss or gradient; of weights that five steps of AdamW have moved
HALVES = {
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_model": 32,
    "vocab_size": zoo.VOCAB_SIZE,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
IMAGES = {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 3}


@dataclass(frozen=True)
class Trial:
    """A model and a batch for it."""

    kind: str
    factory: str
    make: Callable[[], nn.Module]
    batch: Mapping[str, Any]


def _of(kind: str, factory: str, batch: Mapping[str, Any], **settings: Any) -> Trial:
    def make() -> nn.Module:
        config = transformers.AutoConfig.for_model(kind)
        known = set(type(config).__dataclass_fields__) | set(config.attribute_map) | {"num_labels"}
        made = type(config)(**{name: value for name, value in settings.items() if name in known})
        for name, value in vars(made).items():
            if "drop" in name and isinstance(value, float):
                setattr(made, name, 0.0)
        made.decoder_start_token_id = settings.get("decoder_start_token_id")
        torch.manual_seed(0)
        return getattr(transformers, factory).from_config(made).train()

    return Trial(kind, factory, make, batch)


def _language(name: str) -> Trial:
    factory = "AutoModelForMaskedLM" if zoo.is_masked(name) else "AutoModelForCausalLM"
    return Trial(name, factory, lambda: zoo.build(name), zoo.batch(name))


def _llava() -> nn.Module:
    text = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, pad_token_id=0)
    vision = {**SMALL, "num_hidden_layers": 2, "image_size": 32, "patch_size": 16, "projection_dim": 32}
    del vision["vocab_size"]
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            text_config=text,
            vision_config=transformers.CLIPVisionConfig(**vision),
            image_token_index=4,
            vision_feature_layer=-1,
        )
    )
    model.model.vision_tower.requires_grad_(False)
    return model.train()


PICTURES = IDS.clone()
PICTURES[PICTURES == 4] = 5
PICTURES[:, 1:5] = 4  # an image of 32 x 32 is four patches of 16 x 16
LABELLED = {"input_ids": IDS, "labels": CLASSES}
WITH_IMAGE = {"input_ids": PICTURES, "pixel_values": PIXELS, "labels": PICTURES}
SPEECH = torch.rand(2, 80, 32, generator=torch.Generator().manual_seed(3))
TRIALS = (
    *(_language(name) for name in (*zoo.CAUSAL, *zoo.MASKED)),
    _of("llama", "AutoModelForSequenceClassification", LABELLED, **SMALL, num_labels=3, pad_token_id=0),
    _of("bert", "AutoModelForSequenceClassification", LABELLED, **SMALL, num_labels=3, pad_token_id=0),
    _of(
        "bert",
        "AutoModelForTokenClassification",
        {"input_ids": IDS, "labels": IDS % 3},
        **SMALL,
        num_labels=3,
    ),
    _of("vit", "AutoModelForImageClassification", {"pixel_values": PIXELS, "labels": CLASSES}, **IMAGES),
    _of("dinov2", "AutoModelForImageClassification", {"pixel_values": PIXELS, "labels": CLASSES}, **IMAGES),
    _of(
        "t5",
        "AutoModelForSeq2SeqLM",
        {"input_ids": IDS, "labels": IDS},
        **{**SMALL, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4},
        decoder_start_token_id=0,
    ),
    *(
        _of(kind, "AutoModelForSeq2SeqLM", {"input_ids": IDS, "labels": IDS}, **HALVES)
        for kind in ("bart", "mbart", "marian", "m2m_100", "pegasus")
    ),
    _of(
        "whisper",
        "AutoModelForSpeechSeq2Seq",
        {"input_features": SPEECH, "labels": IDS},
        **{**HALVES, "max_source_positions": 16, "max_target_positions": 64},
    ),
    Trial("llava, its vision tower frozen", "LlavaForConditionalGeneration", _llava, WITH_IMAGE),
    *(
        Trial(name, "", lambda name=name: zoo_of_parts.build(name)[0], zoo_of_parts.build(name)[1])  # type: ignore[misc]
        for name in zoo_of_parts.MODELS
    ),
    *(
        Trial(name, "", lambda name=name: zoo_of_lists.build(name)[0], zoo_of_lists.build(name)[1])  # type: ignore[misc]
        for name in zoo_of_lists.MODELS
    ),
)


# In room for all, so that every layer leaves its slot and is recomputed, and on two workers.
WAYS: tuple[dict[str, Any], ...] = (
    {"device": "cpu"},
    {"device": "emulated:1", "slots": 2, "activations": "recompute"},
    {"device": "emulated:2"},
)
STEPS = 5


@dataclass
class Course:
    """What a few steps of AdamW made: the first output and gradients, the losses, and where the weights end."""

    output: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    losses: torch.Tensor
    weights: dict[str, torch.Tensor]


def tried(trial: Trial) -> str:
    """Return a row of the table."""
    warnings.simplefilter("ignore")
    plain = trial.make()
    want, adapted = _train(plain, trial.batch), None
    name, blocks, columns = type(plain).__name__, " | ", []
    for way in WAYS:
        results = []
        try:
            model = trial.make()
            streamed = outsize.wrap(model, device_memory="1GiB", home="host", **way)
            results += _compared(_train(streamed, trial.batch), want)
            parts = runner_of(streamed).split
            blocks = f"{_lists(parts)} | {parts.streamed_share:.0%}"
            targets = _targets(trial.make(), [unit.name for unit in parts.spec.units if unit.kind == "block"])
            outsize.unwrap(streamed)
            if targets:
                adapted = adapted or _train(_adapted(trial, targets), trial.batch)
                streamed = outsize.wrap(_adapted(trial, targets), device_memory="1GiB", home="host", **way)
                results.append(max(_compared(_train(streamed, trial.batch), adapted), key=_severity))
                outsize.unwrap(streamed)
            else:
                results.append("no linear layer")
        except outsize.OutsizeError as error:
            results += [f"no: {str(error).partition(chr(10))[0]}"] * (4 - len(results))
        columns.append(results)
    fits, *others = columns
    cells = [*fits, *(max(results, key=_severity) for results in others)]
    return f"| {trial.kind} | {name} | {blocks} | {' | '.join(cells)} |"


def _severity(result: str) -> tuple[int, str]:
    order = ("no linear", "equal", "rounding", "no:", "differs")
    return next(at for at, word in enumerate(order) if result.startswith(word)), result


def _targets(model: nn.Module, units: Sequence[str]) -> list[str]:
    """Return the names of the linear layers in units."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    within = [name for name in names if any(f"{name}.".startswith(f"{unit}.") for unit in units)]
    # PEFT refuses the one of Mamba, and routers that return several things.
    return [name for name in within if not name.endswith(("out_proj", "router"))]


def _adapted(trial: Trial, targets: list[str]) -> nn.Module:
    model = trial.make().requires_grad_(False)
    config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(1)
    return peft.inject_adapter_in_model(config, model).train(model.training)


def _train(model: nn.Module, batch: Mapping[str, Any]) -> Course:
    for part in model.modules():  # as training has no use for a cache, which lays keys out otherwise
        if hasattr(config := getattr(part, "config", None), "use_cache"):
            config.use_cache = False
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True)
    losses, output, gradients = [], [], {}
    for step in range(STEPS):
        torch.manual_seed(step)
        numpy.random.seed(step)  # wav2vec2 hides parts of sounds by it
        made = model(**batch)
        loss = zoo_of_lists.loss_of(made)
        loss.backward()
        losses.append(loss.detach().clone())
        if not step:
            output = [value.detach().clone() for value in zoo_of_lists.tensors_of(made)]
            gradients = {
                name: None if parameter.grad is None else parameter.grad.clone()
                for name, parameter in model.named_parameters()
            }
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Course(output, gradients, torch.stack(losses), weights)


def _compared(got: Course, want: Course) -> list[str]:
    """Return in words how near a first forward, its gradients, and the losses and weights of all steps are."""
    if len(got.output) != len(want.output):
        return ["differs: another number of tensors returned"] * 3
    pairs = [(got.gradients[name], gradient) for name, gradient in want.gradients.items()]
    absent = any((mine is None) != (gradient is None) and gradient is not None for mine, gradient in pairs)
    gradients = [(mine, gradient) for mine, gradient in pairs if mine is not None and gradient is not None]
    steps = [(got.losses, want.losses), *((got.weights[name], value) for name, value in want.weights.items())]
    return [
        _nearness(list(zip(got.output, want.output, strict=True)), ROUNDING),
        "differs: a gradient is missing" if absent else _nearness(gradients, ROUNDING),
        _nearness(steps, AFTER_STEPS),
    ]


def _nearness(pairs: list[tuple[torch.Tensor, torch.Tensor]], rounding: float) -> str:
    if all(torch.equal(got, want) for got, want in pairs):
        return "equal"
    scale = max(float(want.abs().max()) for _, want in pairs if want.numel())
    off = max(float((got - want).abs().max()) for got, want in pairs if want.numel()) / max(scale, 1.0)
    return f"rounding {off:.0e}" if off <= rounding else f"differs by {off:.0e}"


def _lists(parts: Split) -> str:
    """Return the names of lists, those of stages of one kind as one."""
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", f"{name}.")[:-1] for name in parts.layers)
    return ", ".join(f"`{name}`" for name in names if name) or "its own modules"


def main(kinds: Sequence[str]) -> None:
    """Write the page; of ``kinds`` alone where there are any, beside the rows that it has."""
    transformers.logging.set_verbosity_error()
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = {_key(line): line for line in lines if line.startswith("| ")}
    keys = [f"{trial.kind} | {type(trial.make()).__name__}" for trial in TRIALS]
    for trial, key in zip(TRIALS, keys, strict=True):
        if not kinds or trial.kind in kinds:
            rows[key] = tried(trial)
            sys.stderr.write(f"{rows[key]}\n")
            written = [rows[each] for each in keys if each in rows]
            PAGE.write_text(f"{INTRODUCTION}{chr(10).join(written)}\n", encoding="utf-8")


def _key(row: str) -> str:
    """Return the kind and the class that a row is of."""
    return " | ".join(row.removeprefix("| ").split(" | ")[:2])


if __name__ == "__main__":
    main(sys.argv[1:])
