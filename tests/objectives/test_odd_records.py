"""Records as people have them, and runs that are gone on with as something else."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from objectives.test_objectives import losses, make_run, make_t5
from outsize.errors import ConfigError, DataError, OutsizeError
from outsize.functions import train
from outsize.objectives.objective_data import tell_of_lengths
from outsize.objectives.objective_records import Classes, read_rows
from outsize.objectives.recipes import RECIPES
from tiny import tiny_run

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("default")  # those of TRL are its own


def read(directory: Path, objective: str, records: list[Any] | str) -> list[dict[str, Any]]:
    config = make_run(directory, objective)
    path = Path(config.data.path).with_suffix(".csv" if isinstance(records, str) else ".jsonl")
    text = records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(text)
    data = config.data.model_copy(update={"path": str(path)})
    config = config.model_copy(update={"data": data})
    return read_rows(config, objective, RECIPES[objective], lambda _: None)


@pytest.mark.parametrize(
    ("objective", "record", "words"),
    [
        (
            "dpo",
            {"prompt": "a", "chosen": None, "rejected": "b"},
            "and found 'prompt', 'rejected'; data.columns",
        ),
        (
            "dpo",
            {"chosen": "a", "rejected": 3},
            "'rejected' must be a string or a list of messages, found int",
        ),
        ("orpo", {"prompt": "", "chosen": "", "rejected": "b"}, "field 'chosen' is empty"),
        ("embed", {"anchor": " ", "positive": "b"}, "field 'anchor' is empty"),
        ("classify", {"text": "a", "label": float("nan")}, "field 'label' is a name or a number, not nan"),
    ],
)
def test_a_record_that_nothing_can_be_learnt_from_is_refused(
    objective: str, record: dict[str, Any], words: str, tmp_path: Path
):
    with pytest.raises(DataError, match=words):
        read(tmp_path, objective, [record])


def test_a_prompt_may_be_empty(tmp_path: Path):
    assert read(tmp_path, "dpo", [{"prompt": "", "chosen": "a", "rejected": "b"}])[0]["prompt"] == ""


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["10", "9", "-2"], ["-2", "9", "10"]),  # in the order of numbers
        (["007", "8"], ["007", "8"]),
        (["1", "b"], ["1", "b"]),
        (["1", "2.5"], None),  # measures
    ],
)
def test_labels_of_a_table_are_numbers_where_all_are(
    labels: list[str], names: list[str] | None, tmp_path: Path
):
    rows = read(tmp_path, "classify", "text,label\n" + "".join(f"some text,{label}\n" for label in labels))
    classes = Classes([row["label"] for row in rows], {})
    if names is None:
        assert [classes.number(row["label"]) for row in rows] == [1.0, 2.5]
        assert classes.changes["problem_type"] == "regression"
    else:
        assert list(classes.changes["id2label"].values()) == names


def test_texts_are_not_set_apart_from_nothing(tmp_path: Path):
    alone = {"objective": "embed", "tokens_per_step": 32}
    with pytest.raises(ConfigError, match="two at least"):
        train(make_run(tmp_path, "embed", train=alone))


def test_texts_of_an_encoder_decoder_are_ended_to_be_classified(tmp_path: Path):
    """It takes the state at the token that ends a text, and tokenizers of others write none."""
    make_t5(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.pad_token = "!"
    tokenizer.save_pretrained(tmp_path / "model")
    config = make_run(tmp_path, "classify")
    train(config)
    assert len(set(losses(config))) == 2


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of one step, which every refusal leaves as it is."""
    root = tmp_path_factory.mktemp("begun")
    train(make_run(root, "dpo", train={"objective": "dpo", "steps": 1}))
    return root


@pytest.mark.parametrize("how", ["auto", "path"])
@pytest.mark.parametrize("other", ["orpo", "sft"])
def test_a_run_is_not_gone_on_with_as_another(how: str, other: str, begun: Path):
    resume = "auto" if how == "auto" else str(begun / "run")
    more = {"objective": other, "steps": 3, "resume": resume}
    run = make_run(begun, "dpo", "run" if how == "auto" else "other", train=more)
    with pytest.raises(OutsizeError, match=f"has dpo, and cannot go on with {other}"):
        train(run)


def test_answers_that_are_cut_and_records_that_are_left_out_are_told(tmp_path: Path):
    config = make_run(tmp_path, "dpo", train={"objective": "dpo"}, data={"seq_len": 8})
    short, long = ({"prompt_ids": [1] * 4, "chosen_ids": [1] * 4, "rejected_ids": [1] * n} for n in (4, 5))
    said: list[str] = []
    tell_of_lengths(config, [short, long], [short, long, long], said.append)
    assert said == [
        "1 of 3 records are left out: what is asked, or an answer, is too long for data.seq_len=8",
        "1 of 2 records are longer than data.seq_len (8): their answers are cut",
    ]
    said.clear()
    tell_of_lengths(config, [short], [short], said.append)
    assert not said


@pytest.mark.parametrize("how", ["auto", "path"])
@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"columns": {"chosen": "rejected", "rejected": "chosen"}}},
        {"data": {"roles": {"agent": "assistant"}}},
        {"eval": {"split": 0.5, "every": 1}},
        {"train": {"tokens_per_step": 64}},
    ],
)
def test_a_run_is_not_gone_on_with_over_other_records(how: str, changed: dict[str, Any], begun: Path):
    resume = "auto" if how == "auto" else str(begun / "run")
    more = {"objective": "dpo", "steps": 3, "resume": resume, **changed.get("train", {})}
    run = make_run(begun, "dpo", "run" if how == "auto" else "other", **{**changed, "train": more})
    ((section, value),) = changed.items()
    with pytest.raises(OutsizeError, match=f"{section}.{next(iter(value))}: the run in .* cannot go on with"):
        train(run)


def test_settings_that_a_run_of_a_trainer_goes_on_with_otherwise_are_said(tmp_path: Path):
    train(make_run(tmp_path, "dpo", train={"objective": "dpo", "steps": 1}))
    said: list[str] = []
    more = {"objective": "dpo", "steps": 2, "resume": "auto", "beta": 0.5}
    train(make_run(tmp_path, "dpo", train=more, optimizer={"lr": 5e-4}), announce=said.append)
    assert [line for line in said if "goes on with" in line] == [
        "note: the run goes on with optimizer.lr=0.0005, and had 0.001",
        "note: the run goes on with train.beta=0.5, and had nothing",
        "note: the run goes on with train.steps=2, and had 1",
    ]


def test_how_alike_two_texts_are_is_told_as_unused(tmp_path: Path):
    config = make_run(tmp_path, "embed")
    Path(config.data.path).write_text('{"anchor": "a", "positive": "b", "score": 0.1}\n' * 2)
    said: list[str] = []
    read_rows(config, "embed", RECIPES["embed"], said.append)
    assert [line.partition(": ")[2] for line in said] == ["in the records and not used: score (2 records)"]


def test_a_checkpoint_of_the_engines_is_no_trainers(tmp_path: Path):
    sft = tiny_run(tmp_path, memory={"home": "host"}, train={"run_dir": str(tmp_path / "sft")})
    alone = Path(train(sft).export_dir or "").rename(tmp_path / "alone")  # apart from the run that made it
    with pytest.raises(ConfigError, match="is a checkpoint of the engine's"):
        train(make_run(tmp_path, "dpo", "other", train={"objective": "dpo", "resume": str(alone)}))
