"""Runs of masked language models: what transformers' Trainer and collator make of the same text, and no copying."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from outsize.checkpoint.checkpoint_state import latest
from outsize.config import Config
from outsize.config.load import parse_config
from outsize.data import open_data
from outsize.data.batch import Masker
from outsize.errors import ConfigError, DataError
from outsize.functions import train
from outsize.model.build import is_masked
from support import assert_same_end, in_dir, make_run, make_tokenizer
from zoo import make_config

ALONE = {"microbatches": 1, "loss": "model"}


def losses_of(config: Config) -> list[float]:
    lines = (Path(str(config.train.run_dir)) / "heartbeat.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


class OneByOne:
    """transformers' collator over the sequences of a run, each with a generator of its own."""

    def __init__(self, tokenizer: Any, masker: Masker) -> None:
        self._tokenizer, self._masker, self._number = tokenizer, masker, 0

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        made = []
        for row in rows:
            seed = self._masker.seed_of("trained", self._number)
            made.append(DataCollatorForLanguageModeling(self._tokenizer, seed=seed)([row["input_ids"]]))
            self._number += 1
        return {name: torch.cat([each[name] for each in made]) for name in ("input_ids", "labels")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_run_is_bit_for_bit_that_of_the_trainer_with_the_collator(name: str, tmp_path: Path) -> None:
    config = make_run(tmp_path, name, train=ALONE)
    train(config)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    with open_data(config.data.path, tokenizer, seq_len=16, cache_dir=tmp_path / "c", seed=3) as data:
        rows = [{"input_ids": ids} for step in range(4) for ids in data.batch(step, 4).input_ids.tolist()]
    torch.manual_seed(0)
    trainer = Trainer(
        AutoModelForMaskedLM.from_pretrained(config.model.path),
        TrainingArguments(
            str(tmp_path / "plain"),
            max_steps=4,
            per_device_train_batch_size=4,
            train_sampling_strategy="sequential",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            max_grad_norm=0.5,
            optim="adamw_torch_fused",
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        data_collator=OneByOne(tokenizer, Masker(tokenizer, 3)),
        train_dataset=rows,
    )
    trainer.train()
    saved = latest(tmp_path / "run")
    assert saved is not None
    ours = {key: tensor for path in saved.glob("*.safetensors") for key, tensor in load_file(path).items()}
    theirs = dict(trainer.model.state_dict())
    compared = [key for key in theirs if key in ours]
    assert len(compared) > 10
    assert [key for key in compared if not torch.equal(ours[key], theirs[key])] == []


def test_a_model_cannot_learn_to_copy(tmp_path: Path) -> None:
    """Letters drawn at random cannot be guessed: the loss stays near the logarithm of how many there are."""
    letters = random.Random(0)
    (tmp_path / "data.txt").write_text("".join(letters.choice("abcdefgh") for _ in range(8000)))
    config = make_run(
        tmp_path, "bert", train={**ALONE, "steps": 40, "tokens_per_step": 1024}, optimizer={"lr": 1e-2}
    )
    train(config)
    assert losses_of(config)[-1] > math.log(8) - 0.15


@pytest.mark.parametrize("name", ["bert"])
def test_a_run_that_goes_on_hides_what_it_would_have_hidden(name: str, tmp_path: Path) -> None:
    whole = make_run(tmp_path, name, train={"loss": "model", "save_every": 2})
    train(whole)
    more_threads = whole.data.model_copy(update={"workers": 3, "prefetch": 4})
    train(in_dir(whole, tmp_path / "parts", steps=2).model_copy(update={"data": more_threads}))
    train(in_dir(whole, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "run", tmp_path / "parts")


def test_evaluation_hides_the_same_tokens_every_time(tmp_path: Path) -> None:
    sections = {"eval": {"split": 0.3, "every": 1}, "optimizer": {"lr": 1e-30}}
    config = make_run(tmp_path, "bert", train={"loss": "model"}, **sections)
    train(config)
    lines = (tmp_path / "run" / "heartbeat.jsonl").read_text().splitlines()
    measured = [record["eval_loss"] for record in map(json.loads, lines) if "eval_loss" in record]
    assert len(measured) > 2
    assert len(set(measured)) == 1


def test_a_step_in_which_nothing_is_hidden_changes_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    config = make_run(tmp_path, "bert", train={"loss": "model"}, data={"mlm_probability": 0.01})
    train(config)
    assert all(map(math.isfinite, losses_of(config)))


def test_what_is_masked_is_said_and_can_be_set(tmp_path: Path) -> None:
    told: list[str] = []
    config = make_run(tmp_path, "bert", train={"loss": "model"}, data={"mlm_probability": 0.4})
    train(config, announce=told.append)
    assert any(
        "40.0% of the tokens are to be predicted; of these 80.0% become <mask>" in line for line in told
    )
    with pytest.raises(ConfigError, match=r"data.random_replace_prob: .*more than all"):
        parse_config({**config.model_dump(), "data": {"path": "a", "random_replace_prob": 0.3}})


def test_a_masked_model_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    config = make_run(tmp_path, "bert", train={"loss": "model"})
    make_tokenizer().save_pretrained(config.model.path)
    with pytest.raises(DataError, match="no mask token"):
        train(config)


def test_distillation_of_a_masked_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    config = make_run(tmp_path, "bert", train={"objective": "distill", "teacher": str(tmp_path / "model")})
    with pytest.raises(
        ConfigError, match=r"a bert predicts hidden tokens; train it with train.objective=sft"
    ):
        train(config)


def test_what_predicts_the_next_token_is_not_masked() -> None:
    assert [name for name in ("llama", "gpt2", "bert", "roberta") if is_masked(make_config(name))] == [
        "bert",
        "roberta",
    ]
