"""What is wrong before the first step: files, sizes, keys. Nothing at all is left of such a run."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaAttention

import zoo
from bad_input.world import WEIGHTS, World, command, make_model, names_below, run_well
from outsize.errors import CheckpointError, ConfigError, DataError, InfeasiblePlanError, ModelError
from outsize.training.forecast import plan
from outsize.training.run import train


def remove_weights(model: Path) -> None:
    (model / WEIGHTS).unlink()


def cut_weights(model: Path) -> None:
    content = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(content[: len(content) // 2])


def cut_header(model: Path) -> None:
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:100])


def empty_weights(model: Path) -> None:
    (model / WEIGHTS).write_bytes(b"")


def drop_a_tensor(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, model / WEIGHTS)


def claim_another_width(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))


def spoil_config(model: Path) -> None:
    (model / "config.json").write_text("{")


def remove_config(model: Path) -> None:
    (model / "config.json").unlink()


def name_unknown_architecture(model: Path) -> None:
    (model / "config.json").write_text('{"model_type": "lamma"}')


MODEL_FAULTS: list[tuple[Callable[[Path], None], type[ModelError], str]] = [
    (remove_weights, CheckpointError, r"holds neither model\.safetensors nor .*; give the directory"),
    (cut_weights, CheckpointError, r"truncated.*its header says \d+; download it again"),
    (cut_header, CheckpointError, "truncated.*no whole header; download it again"),
    (empty_weights, CheckpointError, "truncated.*download it again"),
    (drop_a_tensor, CheckpointError, "lacks 1 tensors.*model.layers.2.mlp.up_proj.weight"),
    (claim_another_width, CheckpointError, r"shape \(32, 48\), but .* has shape \(32, 64\) by config.json"),
    (spoil_config, CheckpointError, "config.json cannot be read as JSON"),
    (remove_config, CheckpointError, "has no config.json"),
    (name_unknown_architecture, ModelError, "cannot read the config of .*check the name"),
]


@pytest.mark.parametrize(("spoil", "kind", "match"), MODEL_FAULTS, ids=[f[0].__name__ for f in MODEL_FAULTS])
def test_a_damaged_model_is_refused(
    world: World, spoil: Callable[[Path], None], kind: type[ModelError], match: str
) -> None:
    model = world.own_model()
    spoil(model)
    world.fails(kind, match, model={"path": str(model)})


def test_weights_that_shrink_after_the_check_are_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers are checked first; the bytes are read later, when the home is filled."""
    from outsize.session import stream

    model = world.own_model()
    whole = (model / WEIGHTS).read_bytes()
    fill = stream.StreamedTrainer.fill

    def cut_and_fill(self: stream.StreamedTrainer) -> None:
        (model / WEIGHTS).write_bytes(whole[: len(whole) // 2])
        try:
            fill(self)
        finally:
            (model / WEIGHTS).write_bytes(whole)

    monkeypatch.setattr(stream.StreamedTrainer, "fill", cut_and_fill)
    world.fails(CheckpointError, "ended at byte", model={"path": str(model)})
    monkeypatch.undo()


def test_no_such_model(world: World) -> None:
    world.fails(
        ModelError, "no such file or directory; give a model", model={"path": str(world.root / "none")}
    )


# --- models that cannot be streamed -------------------------------------------------------------------------


def test_a_frozen_model_is_refused(world: World) -> None:
    world.fails(ModelError, "leaves no parameter to train", model={"freeze": ["*"]})


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sequences_longer_than_the_model_takes_are_refused(world: World, name: str) -> None:
    """Whether the limit is a number in the config only, or the rows of a table of positions."""
    model = world.model if name == "llama" else make_model(world.root / name, name)
    train_section = {"tokens_per_step": 2 * 65}
    world.fails(
        ConfigError,
        "data.seq_len: 65 is longer than the 64 positions of the model",
        model={"path": str(model)},
        data={"seq_len": 65},
        train=train_section,
    )


def test_a_model_that_cannot_even_try_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_it(*_: object, **__: object) -> None:
        raise IndexError("position 12 of 12")

    monkeypatch.setattr(LlamaAttention, "forward", raise_it)
    world.fails(
        ModelError,
        "LlamaForCausalLM raised in a trial on sequences of 12 tokens: IndexError: position 12 of 12; is the length",
    )
    monkeypatch.undo()


# --- data ---------------------------------------------------------------------------------------------------


def test_an_empty_data_set_is_refused(world: World) -> None:
    np.save(world.root / "empty.npy", np.zeros(0, np.uint16))
    world.fails(DataError, "empty|fewer than one sequence", data={"path": str(world.root / "empty.npy")})


def test_no_such_data(world: World) -> None:
    world.fails(DataError, "no such file or directory", data={"path": str(world.root / "none")})


def test_tokens_outside_the_embedding_are_refused(world: World) -> None:
    np.save(world.root / "large.npy", np.full(100, zoo.VOCAB_SIZE, np.uint16))
    world.fails(
        DataError,
        "token id 97 .* is outside the vocabulary of 97",
        data={"path": str(world.root / "large.npy")},
    )


@pytest.mark.parametrize(
    "content", [None, '{"model":' + "[" * 100_000 + "]" * 100_000 + "}"], ids=["none", "deep"]
)
def test_text_without_a_tokenizer_is_refused(world: World, content: str | None) -> None:
    model = world.own_model()
    if content is not None:
        (model / "tokenizer.json").write_text(content)
    (world.root / "text.txt").write_text("some words " * 100)
    world.fails(
        DataError,
        "no tokenizer in .*; copy the tokenizer files of the model there, or use pre-tokenised data",
        data={"path": str(world.root / "text.txt")},
        model={"path": str(model)},
    )


# --- keys and budgets ---------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_a_suggestion(world: World) -> None:
    with pytest.raises(ConfigError, match=r"train\.stepz: no such key; did you mean train\.steps\?"):
        world.config(train={"stepz": 3})
    (world.root / "run.yaml").write_text("model: {path: m}\ndata: {path: d}\ntrain: {stepz: 3}\n")
    outcome = command("train", str(world.root / "run.yaml"), "--json")
    assert (outcome.status, outcome.result["error"]) == (2, "ConfigError")
    assert "did you mean train.steps?" in outcome.err
    assert names_below(world.root) == {"run.yaml"}


TIERS = {
    "device": ("device_memory", {"device": "cpu", "home": "disk"}),
    "host": ("host_memory", {"device": "cpu", "home": "host"}),
    "staged": ("host_memory", {"device": "emulated:1", "home": "disk"}),
    "disk": ("disk_memory", {"device": "cpu", "home": "disk"}),
}


@pytest.mark.parametrize("case", TIERS)
def test_a_budget_too_small_says_by_how_much(world: World, case: str) -> None:
    """One byte less than what the message asks for does not fit; exactly that much trains."""
    key, memory = TIERS[case]
    tier = key.removesuffix("_memory")
    error = world.fails(InfeasiblePlanError, rf"short: {tier} by ", memory={**memory, key: 4096})
    assert isinstance(error, InfeasiblePlanError)
    (short_by,) = error.short_by.values()
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(world.config(memory={**memory, key: 4096 + short_by - 1}))
    assert caught.value.short_by == {tier: 1}
    result = run_well(world, memory={**memory, key: 4096 + short_by})
    assert result.steps == 3


def test_two_budgets_too_small_are_both_named(world: World) -> None:
    memory = {"device_memory": 4096, "disk_memory": 8192}
    error = world.fails(InfeasiblePlanError, "short: device by .*, disk by ", memory=memory)
    assert isinstance(error, InfeasiblePlanError)
    enough = {"device_memory": 4096 + error.short_by["device"], "disk_memory": 8192 + error.short_by["disk"]}
    assert train(world.config(memory=enough)).steps == 3
