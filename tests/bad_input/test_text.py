"""Text, its tokenizer, and labels of which none is trained."""

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import zoo
from bad_input.world import WEIGHTS, World, run_well
from outsize.errors import DataError


def write_tokenizer(directory: Path, num_tokens: int) -> None:
    """A tokenizer that knows single bytes, as many as the model has rows or more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["<eos>", *letters, *(token for token in alphabet if token not in letters)][:num_tokens]
    backend = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(directory)


def jsonl(path: Path, records: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def reading_model(world: World) -> Path:
    """A model with a tokenizer that fits."""
    model = world.own_model()
    write_tokenizer(model, zoo.VOCAB_SIZE)
    return model


def test_a_token_without_a_row_is_refused_where_a_text_uses_it_and_only_there(world: World) -> None:
    model = world.own_model()
    write_tokenizer(model, zoo.VOCAB_SIZE)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<image>"], special_tokens=True)
    tokenizer.pad_token = "<image>"  # it fills rows up, where no one looks
    tokenizer.save_pretrained(model)
    (world.root / "text.jsonl").write_text('{"text": "some words, and some more"}\n' * 100)
    data = {"path": str(world.root / "text.jsonl"), "pack": "none"}
    sections = {"model": {"path": str(model)}, "data": data}
    run_well(world, **sections)
    (world.root / "text.jsonl").write_text('{"text": "some words"}\n' * 7 + '{"text": "an <image>"}\n')
    name = (
        f"text.jsonl, document 8: token id {zoo.VOCAB_SIZE} ('<image>') is outside the {zoo.VOCAB_SIZE} rows"
    )
    world.fails(DataError, re.escape(name), **sections)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("empty.txt", "", "the data set is empty"),
        ("short.txt", "word", "holds 5 tokens, fewer than one sequence of 12; use more data"),
        ("empty.jsonl", "", "empty|no record"),
        ("odd.jsonl", '{"text": "some words"}\n{"text": \n', "odd.jsonl:2|line 2"),
        ("unknown.jsonl", '{"sentence": "some words"}\n', "no known format has the fields"),
        ("asked.jsonl", '{"messages": [{"role": "user", "content": "so"}]}\n' * 9, "no token is trained"),
    ],
)
def test_text_that_cannot_be_trained_on_is_refused(
    world: World, reading_model: Path, name: str, content: str, match: str
) -> None:
    (world.root / name).write_text(content)
    world.fails(
        DataError,
        match,
        tokenises=name == "short.txt",
        model={"path": str(reading_model)},
        data={"path": str(world.root / name)},
    )


@pytest.mark.parametrize("loss", ["model", "chunked"])
def test_a_step_without_a_single_target_changes_nothing(world: World, reading_model: Path, loss: str) -> None:
    """Its mean over nothing would be NaN, and make every weight NaN; the one record with a target comes later."""
    masked = {"prompt": "a" * 40, "completion": "b"}
    data = jsonl(world.root / "masked.jsonl", [masked] * 200 + [{"prompt": "a", "completion": "b"}])
    result = run_well(
        world,
        "masked",
        model={"path": str(reading_model)},
        data={"path": str(data), "pack": "none"},
        train={"loss": loss},
        optimizer={"lr": 0.1, "weight_decay": 0.5},
    )
    assert result.loss == 0.0
    before = load_file(reading_model / WEIGHTS)
    after = {}
    for path in Path(result.export_dir or "").glob("*.safetensors"):
        after.update(load_file(path))
    assert {name: tensor.equal(after[name]) for name, tensor in before.items()} == dict.fromkeys(before, True)
