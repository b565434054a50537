"""Every objective: `outsize train` has the losses and weights of its trainer over the plain model, bit for bit."""

import json
import math
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from outsize import files
from outsize.accelerators import CPU
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader
from outsize.cli.app import app
from outsize.config import Config, dump_config
from outsize.errors import ConfigError, DataError, ModelError, NonFiniteError, OutsizeError, StorageError
from outsize.functions import export, train, verify
from outsize.model.build import build_skeleton, initial_values, load_hf_config
from outsize.objectives import objective_models, objective_run, objective_trainer
from outsize.objectives.recipes import TeacherLogits, logits_file
from support import make_model_dir
from tiny import tiny_model, tiny_run

peft = pytest.importorskip("peft")
pytest.importorskip("trl")
pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("default")  # those of TRL are its own

NUMBERS = range(8)
PAIRS = [
    {"prompt": f"{n} x {n} is ", "chosen": f"{n * n}", "rejected": f"{n * n + 1} or so"} for n in NUMBERS
]
RECORDS: Mapping[str, list[dict[str, Any]]] = {
    **dict.fromkeys(("dpo", "orpo", "reward"), PAIRS),
    "kto": [
        {"prompt": f"{n} x {n} is ", "completion": str(n * n + n % 2), "label": n % 2 == 0} for n in NUMBERS
    ],
    "classify": [{"text": f"{n} is odd", "label": "no" if n % 2 else "yes"} for n in NUMBERS],
    "embed": [{"anchor": f"the square of {n}", "positive": f"{n} times {n}"} for n in NUMBERS],
    "distill": [{"text": f"the square of {n} is {n * n}, as it was and ever will be"} for n in NUMBERS],
    "sft": [{"prompt": f"square: {n}", "completion": str(n * n)} for n in NUMBERS],
}


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would outlive the test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


def make_run(directory: Path, objective: str, name: str = "run", **sections: Mapping[str, Any]) -> Config:
    """A run of two steps of four records."""
    directory.mkdir(exist_ok=True)
    data = directory / f"{objective}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in RECORDS[objective]))
    own: dict[str, Any] = {"objective": objective, "steps": 2, "tokens_per_step": 128, "microbatches": 1}
    if objective == "distill":
        own["teacher"] = str(tiny_model(directory / "teacher", intermediate_size=64))
    given = {
        "data": {"path": str(data), "seq_len": 32},
        "train": {**own, "run_dir": str(directory / name)},
        "memory": {"home": "host"},
    }
    return tiny_run(
        directory, **{key: {**given.get(key, {}), **sections.get(key, {})} for key in {**given, **sections}}
    )


def losses(config: Config) -> list[float]:
    """Of each step, as the trainer has logged them."""
    checkpoint = Path(config.train.run_dir or "") / "checkpoints"
    state = json.loads(
        (checkpoint / (checkpoint / "latest").read_text().strip() / "trainer_state.json").read_text()
    )
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def weights(config: Config) -> dict[str, Tensor]:
    checkpoint = Path(config.train.run_dir or "") / "checkpoints"
    saved = checkpoint / (checkpoint / "latest").read_text().strip()
    return {name: value for path in saved.glob("*.safetensors") for name, value in load_file(path).items()}


def open_plain(name: str, settings: Any, built: Any, adapters: Any = None) -> nn.Module:
    """What `open_wrapped` opens, as transformers does."""
    config = load_hf_config(name)
    config.update(dict(built.changes))
    config.use_cache = False
    with torch.random.fork_rng():
        model = getattr(transformers, built.auto).from_pretrained(name, config=config, dtype=torch.float32)
    skeleton = build_skeleton(config, "fp32", auto=built.auto)
    fresh = initial_values(skeleton, CheckpointReader(name, skeleton, may_lack=True).lacking)
    model.load_state_dict(fresh, strict=False)
    model.requires_grad_(not built.frozen)
    if built.lora is None:
        return model
    torch.manual_seed(torch.initial_seed())
    return peft.get_peft_model(model, built.lora)


def make_t5(directory: Path) -> None:
    """Write an encoder-decoder, and a tokenizer that ends no text."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": 264}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 0}
    tiny_model(directory)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    torch.manual_seed(0)
    made = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **ids, dropout_rate=0.0))
    made.save_pretrained(directory)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that trains as the run does, over plain models."""

    def run(config: Config) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(objective_models, "open_wrapped", open_plain)
            patch.setattr(
                objective_trainer,
                "AdamW",
                lambda model, lr, betas, eps, decay, groups: torch.optim.AdamW(
                    groups, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=True
                ),
            )
            train(config)

    return run


def check(plainly: Any, directory: Path, objective: str, tolerance: float = 0.0, **sections: Any) -> Config:
    config = make_run(directory, objective, **sections)
    result = train(config)
    plain = make_run(directory, objective, "plain", **sections)
    plainly(plain)
    assert not (directory / "plain" / "heartbeat.jsonl").exists()
    first, second = losses(config)
    assert first != second
    want = weights(plain)
    assert weights(config).keys() == want.keys()
    for name, value in weights(config).items():
        assert torch.allclose(value, want[name], rtol=tolerance, atol=tolerance), name
    assert losses(config) == pytest.approx(losses(plain), rel=tolerance, abs=0)
    lines = [json.loads(line) for line in (Path(result.run_dir) / "heartbeat.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert [line["loss"] for line in lines] == pytest.approx(losses(config), rel=1e-6)
    assert result.steps == result.num_steps == 2
    assert result.export_dir is not None
    return config


@pytest.mark.parametrize(
    ("objective", "home"),
    [
        *(("dpo", "host"), ("dpo", "disk"), ("orpo", "host"), ("kto", "disk"), ("reward", "host")),
        *(("classify", "disk"), ("embed", "host"), ("distill", "disk")),
    ],
)
def test_streamed_is_as_plain(objective: str, home: str, plainly: Any, tmp_path: Path):
    if objective == "embed":  # of an encoder, whose checkpoint has a head and lacks a pooler
        tokenizer = transformers.AutoTokenizer.from_pretrained(make_model_dir(tmp_path / "model", "bert"))
        tokenizer.pad_token = "<eos>"
        tokenizer.save_pretrained(tmp_path / "model")
    short = {"data": {"seq_len": 12}, "train": {"objective": "embed", "tokens_per_step": 48}}
    check(plainly, tmp_path, objective, memory={"home": home}, **(short if objective == "embed" else {}))


@pytest.mark.parametrize(("objective", "home"), [("dpo", "disk"), ("kto", "host"), ("classify", "disk")])
def test_adapters(objective: str, home: str, plainly: Any, tmp_path: Path):
    """The reference is the model without them; a new head trains with them."""
    method = {"method": "lora", "objective": objective}
    lora = {"r": 2, "target_modules": "all-linear"}
    config = check(plainly, tmp_path, objective, lora=lora, train=method, memory={"home": home})
    saved = weights(config)
    assert any("lora_A" in name for name in saved)
    assert any("score" in name for name in saved) == (objective == "classify")
    out = Path(export(tmp_path / "run", tmp_path / "out"))
    assert not {"optimizer.pt", "rng_state.pth"} & {path.name for path in out.iterdir()}
    if objective == "classify":
        found = transformers.AutoConfig.from_pretrained(out)
        made = transformers.AutoModelForSequenceClassification.from_pretrained(
            config.model.path, num_labels=found.num_labels
        )
        peft.PeftModel.from_pretrained(made, out)
        assert found.id2label == {0: "no", 1: "yes"}
        with pytest.raises(ModelError, match="adapters of a model for the task SEQ_CLS"):
            export(tmp_path / "run", tmp_path / "merged", merge=True)
    else:
        export(tmp_path / "run", tmp_path / "merged", merge=True)
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")


def test_an_encoder_decoder_is_trained_by_sft_to_rounding(plainly: Any, tmp_path: Path):
    make_t5(tmp_path / "model")
    check(plainly, tmp_path, "sft", tolerance=1e-5)
    said: list[str] = []
    train(make_run(tmp_path, "sft", "noted", data={"pack": "none"}), announce=said.append)
    assert "note: data.pack has no effect: records have fields of their own" in said
    text = tiny_run(tmp_path, memory={"home": "host"}, train={"run_dir": str(tmp_path / "text")})
    with pytest.raises(
        DataError, match="takes records with 'prompt', 'completion', and text files hold none"
    ):
        train(text)
    with pytest.raises(
        ConfigError, match=r"optimizer.name: a t5 goes to a trainer of transformers, and there"
    ):
        train(make_run(tmp_path, "sft", optimizer={"name": "sgd"}))


def test_messages_are_written_with_the_template(tmp_path: Path):
    config = make_run(
        tmp_path,
        "dpo",
        data={"template": "plain", "roles": {"me": "user"}, "seq_len": 56},
        train={"objective": "dpo", "tokens_per_step": 112},
    )
    turns = (
        [{"role": "me", "content": "3 x 3"}],
        [{"role": "bot", "content": "9"}],
        [{"role": "bot", "content": "8"}],
    )
    record = json.dumps(dict(zip(("prompt", "chosen", "rejected"), turns, strict=True)))
    Path(config.data.path).write_text(f"{record}\n" * 4)
    assert train(config).steps == 2
    short = config.model_copy(update={"data": config.data.model_copy(update={"seq_len": 28})})
    with pytest.raises(
        DataError, match=r"no record is trained: .*longer than data\.seq_len=\d+ tokens; raise it"
    ):
        train(
            short.model_copy(
                update={"train": config.train.model_copy(update={"run_dir": str(tmp_path / "b")})}
            )
        )


@pytest.mark.parametrize("trained", ["texts", "conversations"])
def test_a_model_is_measured_on_the_form_that_it_is_trained_on(trained: str, tmp_path: Path):
    """A system prompt in one record makes conversations of all texts of its file, and of no other file."""
    config = make_run(tmp_path, "dpo", eval={"data": str(tmp_path / "eval.jsonl")})
    chats = "".join(json.dumps({**pair, "system": "s"}) + "\n" for pair in PAIRS)
    texts = Path(config.data.path).read_text()
    one, other = (texts, chats) if trained == "texts" else (chats, texts)
    Path(config.data.path).write_text(one)
    (tmp_path / "eval.jsonl").write_text(other)
    key = "data.path" if trained == "texts" else "eval.data"
    with pytest.raises(DataError, match=f"{key}: the records are texts where those of"):
        train(config)


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto", "distill"])
def test_text_stops_where_the_replies_of_an_objective_end(objective: str, method: str, tmp_path: Path):
    config = make_run(
        tmp_path,
        objective,
        data={"template": "chatml", "seq_len": 32},
        train={"objective": objective, "method": method, "tokens_per_step": 64, "steps": 1},
    )
    user, good = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    asked = {"prompt": [user], "chosen": [good], "rejected": [{**good, "content": "b"}]}
    judged = {"prompt": [user], "completion": [good]}
    records: dict[str, list[dict[str, Any]]] = {
        "kto": [{**judged, "label": True}, {**judged, "label": False}],
        "distill": [{"messages": [user, good]}],
    }
    lines = [json.dumps(record) + "\n" for record in records.get(objective, [asked])]
    Path(config.data.path).write_text("".join(lines * 6))
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    tokenizer.save_pretrained(config.model.path)
    said: list[str] = []
    result = train(config, announce=said.append)
    mark = tokenizer.convert_tokens_to_ids("<|im_end|>")
    places = [Path(result.export_dir or ""), export(Path(config.train.run_dir or ""), tmp_path / "out")]
    for place in places:
        ends = json.loads((place / "generation_config.json").read_text())["eos_token_id"]
        assert mark in ends
    assert sum("replies end with '<|im_end|>'" in line for line in said) == 1


@pytest.mark.parametrize(("objective", "home"), [("dpo", "host"), ("classify", "disk")])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_that_was_killed_goes_on_with_the_same_bits(
    objective: str, home: str, method: str, tmp_path: Path
):
    sections = {"memory": {"home": home}, "lora": {"r": 2}}
    common = {"objective": objective, "method": method, "steps": 4, "save_every": 2}
    whole = make_run(tmp_path, objective, "whole", train=common, **sections)
    train(whole)
    config = make_run(tmp_path, objective, "cut", train=common, **sections)

    def die(record: Any) -> None:
        if record.step == 3:
            raise ZeroDivisionError

    said: list[str] = []
    with pytest.raises(ZeroDivisionError):
        train(config, progress=die, announce=said.append)
    assert (tmp_path / "cut/checkpoints/latest").read_text() == "checkpoint-2\n"
    assert said[-1] == "the run failed: --resume auto goes on after step 2, from checkpoint-2"
    seen: list[tuple[int, int]] = []
    left = tmp_path / "cut/store/home/of-a-process-that-was-killed.bin"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"weights")
    again = config.model_copy(update={"train": config.train.model_copy(update={"resume": "auto"})})
    result = train(
        again, progress=lambda record: seen.append((record.step, record.num_steps)), announce=said.append
    )
    assert "resumed from checkpoint-2" in said
    assert seen == [(3, 4), (4, 4)]
    assert not left.exists()
    assert result.steps == 4
    assert losses(config) == losses(whole)
    want = weights(whole)
    for name, value in weights(config).items():
        assert torch.equal(value, want[name]), name
    assert train(again).steps == 4  # nothing is left to do
    other = again.model_copy(update={"train": again.train.model_copy(update={"seed": 4})})
    with pytest.raises(ConfigError, match=r"train.seed: the run in .* has 3, and cannot go on with 4"):
        train(other)


def test_ctrl_c_ends_after_the_step_under_way_saved(tmp_path: Path):
    config = make_run(tmp_path, "embed", train={"objective": "embed", "steps": 5})

    def press(record: Any) -> None:
        if record.step == 2:
            signal.raise_signal(signal.SIGINT)

    result = train(config, progress=press)
    assert (result.steps, result.num_steps) == (2, 5)
    assert result.export_dir == str(tmp_path / "run/checkpoints/checkpoint-2")


def test_evaluations_keep_the_best_and_end_a_run(tmp_path: Path):
    config = make_run(
        tmp_path,
        "classify",
        data={"seq_len": 6},
        train={"objective": "classify", "steps": 6, "tokens_per_step": 24},
        optimizer={"lr": 0.0},
        eval={"split": 0.25, "every": 1, "patience": 2},
    )
    said: list[str] = []
    result = train(config, announce=said.append)
    assert (result.steps, result.num_steps, result.stopped_early) == (3, 6, True)
    assert result.best_dir == str(tmp_path / "run/checkpoints/checkpoint-1")
    assert any("2 to measure on" in line for line in said)
    assert "8 texts are longer than data.seq_len (6) and cut" in said
    line = json.loads((tmp_path / "run/heartbeat.jsonl").read_text().splitlines()[0])
    assert line["eval_loss"] == result.eval_loss
    model = transformers.AutoModelForSequenceClassification.from_pretrained(result.export_dir)
    assert model.config.id2label == {0: "no", 1: "yes"}


@pytest.mark.parametrize(
    ("objective", "records", "sections", "words"),
    [
        (
            "dpo",
            [{"prompt": "a", "chosen": "b"}],
            {},
            "jsonl:1: train.objective=dpo takes records with 'chosen', 'rej",
        ),
        ("kto", [{"prompt": "a", "completion": "b", "label": "maybe"}], {}, "is true or false, not 'maybe'"),
        ("classify", [{"text": "a", "label": "x"}] * 4, {}, "all records have the label 'x'"),
        ("embed", [{"anchor": "a", "positive": 3}], {}, "field 'positive' must be a string, found int"),
        ("dpo", [], {}, "no records for train.objective=dpo"),
        ("dpo", [*PAIRS, {"chosen": "a", "rejected": "b"}], {}, "all records of a run have one form"),
        ("dpo", PAIRS, {"memory": {"device_memory": "64KiB"}}, "device"),
    ],
)
def test_what_cannot_be_is_refused_before_work_starts(
    objective: str, records: list[Any], sections: dict[str, Any], words: str, tmp_path: Path
):
    config = make_run(tmp_path, objective, **sections)
    Path(config.data.path).write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(OutsizeError, match=words):
        train(config)
    assert not (tmp_path / "run/checkpoints/latest").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "distill"}, "train.teacher: train.objective=distill learns from another model"),
        ({"on_nonfinite": "skip"}, "train.on_nonfinite: with train.objective=dpo"),
    ],
)
def test_settings_that_contradict_it_are_mistakes_of_the_configuration(
    changes: dict[str, Any], words: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=words):
        make_run(tmp_path, "dpo", train={"teacher": None, **changes})


def test_a_library_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ConfigError, match="install it with: pip install -U trl datasets"):
        train(make_run(tmp_path, "dpo"))


def test_a_teacher_has_the_same_vocabulary(tmp_path: Path):
    other = tiny_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(ConfigError, match="has a vocabulary of 300 tokens"):
        train(make_run(tmp_path, "distill", train={"objective": "distill", "teacher": str(other)}))


def test_logits_of_a_teacher_are_written_once_and_learnt_from_in_every_epoch(tmp_path: Path):
    """Whole, they train as the teacher itself does, bit for bit; the largest alone are said to be another loss."""
    sections: dict[str, Any] = {
        "train": {"steps": 6, "tokens_per_step": 64, "microbatches": 2},
        "eval": {"split": 0.25, "every": 3},
    }
    live = make_run(tmp_path, "distill", "live", **sections)
    train(live)
    run, teacher = tmp_path / "run.yaml", live.train.teacher
    run.write_text(dump_config(live))
    said: list[str] = []

    def again(place: str, top_k: str = "") -> list[float]:
        result = CliRunner().invoke(app, [
            "score", teacher, "--data", str(run), "--want", "logits", "--out", str(tmp_path / place), "--home", "disk",
            "--device", "cpu", "--device-memory", "64MiB", *(["--top-k", top_k] if top_k else []),
        ])  # fmt: skip
        assert result.exit_code == 0, result.output
        other = {**sections["train"], "teacher": str(tmp_path / place)}
        config = make_run(tmp_path, "distill", f"of-{place}", **{**sections, "train": other})
        train(config, announce=said.append)
        return losses(config)

    assert again("whole") == losses(live)
    kept = weights(make_run(tmp_path, "distill", "of-whole"))
    assert all(torch.equal(value, kept[name]) for name, value in weights(live).items())
    assert losses(live)[0] != pytest.approx(again("top", "8")[0], rel=1e-3)
    assert any("of each token the 8 largest: " in line for line in said)
    assert again("all", "264") == pytest.approx(losses(live), rel=1e-5)
    other = make_run(
        tmp_path, "distill", "other", train={**sections["train"], "teacher": str(tmp_path / "top")}
    )
    second = tmp_path / "top/00000001.safetensors"
    *_, last = sorted((tmp_path / "top").iterdir())  # which no step draws
    whole = last.read_bytes()
    last.write_bytes(second.read_bytes())
    with pytest.raises(DataError, match="is of another sequence than the run's of that number"):
        train(other)
    last.write_bytes(whole)
    second.unlink()
    with pytest.raises(ConfigError, match=r"has the logits of 1 of \d+ sequences; make them: outsize score"):
        train(other)


@pytest.mark.parametrize("changed", ["input_ids", "labels", "position_ids", "attention_mask"])
def test_logits_of_other_targets_or_another_mask_are_refused(changed: str, tmp_path: Path):
    """As many targets as there were would be taught what others are followed by."""
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 0]]), "labels": torch.tensor([[1, 2, -100, -100]])}
    written = {
        "logits": torch.zeros(1, 5),
        "input_ids": inputs["input_ids"][0].int(),
        "vocab_size": torch.tensor(5),
    }
    save_file({**written, "counts": inputs["labels"][0] != -100}, logits_file(tmp_path, 0))
    teacher, row = TeacherLogits(tmp_path, 1), torch.tensor([0])
    assert torch.equal(teacher.of(row, inputs, 5)[0], written["logits"])
    other = {"labels": torch.tensor([[1, -100, 3, -100]])}.get(changed, torch.tensor([[0, 1, 0, 1]]))
    with pytest.raises(DataError, match="is of another sequence"):
        teacher.of(row, {**inputs, changed: other}, 5)


def test_a_generation_config_that_is_not_written_as_it_is_read_does_not_cost_the_run(tmp_path: Path):
    said = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}
    tiny_model(tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_text(json.dumps(said))
    saved = Path(train(make_run(tmp_path, "dpo")).export_dir or "")
    assert list(saved.glob("*.safetensors"))
    assert said.items() <= json.loads((saved / "generation_config.json").read_text()).items()


@pytest.mark.parametrize("name", ["rng_state.pth", "trainer_state.json"])
def test_a_disk_that_is_full_when_it_saves_says_so(name: str, tmp_path: Path):
    """Some libraries write in other languages, and name no error of the system."""
    config = make_run(tmp_path, "dpo", train={"save_every": 1})
    (tmp_path / "run/checkpoints/checkpoint-1").mkdir(parents=True)
    (tmp_path / "run/checkpoints/checkpoint-1" / name).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"checkpoint-1.*(dmesg|disk is full|free some)"):
        train(config)


def test_a_checkpoint_has_its_name_for_good_before_it_is_called_the_latest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was made, and synced since, in that order."""
    config = make_run(tmp_path, "dpo", train={"steps": 1})
    done: list[tuple[str, Path]] = []
    sync, rename = files.sync, files.System.rename
    monkeypatch.setattr(files, "sync", lambda path: (done.append(("sync", path)), sync(path)))
    monkeypatch.setattr(
        files.System, "rename", lambda self, a, b: (done.append(("rename", Path(b))), rename(self, a, b))
    )
    saved = Path(train(config).export_dir or "")
    named = done.index(("rename", saved.parent / "latest"))
    assert {*saved.rglob("*"), saved, saved.parent, saved.parent.parent} <= {
        path for kind, path in done[:named] if kind == "sync"
    }


def test_what_cannot_be_saved_is_known_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def breaks(*_: Any, **__: Any) -> None:
        raise ValueError("no such template")

    config = make_run(tmp_path, "dpo")  # its tokenizer is saved first
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", breaks)
    with pytest.raises(
        ConfigError, match="the tokenizer could be read, and cannot be written: no such template"
    ):
        train(config)


def test_what_is_not_finite_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = make_run(tmp_path, "embed", train={"objective": "embed", "temperature": 1e-45})
    with pytest.raises(NonFiniteError, match="step 1: loss nan"):
        train(config)
    monkeypatch.setattr(objective_trainer, "clip_grad_norm_", lambda model, most: torch.tensor(math.inf))
    with pytest.raises(NonFiniteError, match="step 1: gradient norm inf"):
        train(make_run(tmp_path, "embed", "other"))


def test_the_command_prints_plan_preview_and_one_line_of_json(tmp_path: Path):
    config = make_run(tmp_path, "dpo")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    for words, has in (
        (["train", "--dry-run"], "frozen model"),
        (["data"], "8 records, 2.0 steps per epoch"),
        (["train", "--json"], '"steps": 2'),
    ):
        result = CliRunner().invoke(app, [*words, str(tmp_path / "run.yaml")])
        assert result.exit_code == 0, result.output
        assert has in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["loss"] > 0
    assert not (tmp_path / "run/store").exists()


def test_other_commands_send_to_outsize_train(tmp_path: Path):
    with pytest.raises(ConfigError, match="dpo is for outsize train"):
        verify(make_run(tmp_path, "dpo"))


def test_two_models_share_what_a_run_may_hold(tmp_path: Path):
    config = make_run(tmp_path, "dpo")
    budgets = config.memory
    trained, frozen = objective_models._shared(
        config, CPU, "AutoModelForCausalLM", config.model.path, tmp_path
    )
    assert trained.device_memory + frozen.device_memory == budgets.device_memory
    assert 0.99 < (trained.host_memory + frozen.host_memory) / budgets.host_memory <= 1
    assert trained.host_memory == pytest.approx(4 * frozen.host_memory, rel=1e-6)  # 16 bytes beside 4


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="trains in one process; start it without torchrun"):
        train(make_run(tmp_path, "dpo"))


def test_a_checkpoint_is_gone_on_from_in_another_directory(tmp_path: Path):
    train(make_run(tmp_path, "embed"))
    more = {"objective": "embed", "steps": 3, "resume": str(tmp_path / "run")}
    seen: list[int] = []
    result = train(make_run(tmp_path, "embed", "other", train=more), progress=lambda r: seen.append(r.step))
    assert (seen, result.run_dir) == ([3], str(tmp_path / "other"))


@pytest.mark.parametrize("sections", [{}, {"train": {"method": "lora"}}, {"model": {"dtype": "bf16"}}])
def test_a_checkpoint_that_cannot_fit_is_refused_before_the_first_step(
    sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What is asked for is what a checkpoint takes, but for files that are small beside the weights of a real model."""
    config = make_run(tmp_path, "dpo", **sections)
    asked: list[int] = []
    monkeypatch.setattr(objective_run, "check_saves", lambda saved, *_: asked.append(saved))
    saved = Path(train(config).export_dir or "")
    written = sum(
        path.stat().st_size for path in saved.rglob("*") if path.suffix in (".safetensors", ".pt", ".bin")
    )
    assert asked[0] <= written <= 1.05 * asked[0] + 2**17
    monkeypatch.undo()
    monkeypatch.setattr(files, "free_bytes", lambda path: asked[0] - 1)
    with pytest.raises(StorageError, match="the run could not save what it trains"):
        train(make_run(tmp_path, "dpo", "full", **sections))
    assert not list((tmp_path / "full").rglob("checkpoint*"))


def test_the_first_checkpoint_comes_after_five_minutes_and_then_every_thirty(monkeypatch: pytest.MonkeyPatch):
    """As of other runs whose home does not commit; one that goes on from a checkpoint has its first."""
    now = [1000.0]
    monkeypatch.setattr(objective_trainer.time, "monotonic", lambda: now[0])
    config = SimpleNamespace(
        train=SimpleNamespace(save_minutes=None, save_every=0), eval=SimpleNamespace(every=0, on=False)
    )
    following: Any = objective_trainer.Following(
        config, SimpleNamespace(requested=False), print, None, False, _saved_s=1000.0
    )
    following.trainer = SimpleNamespace(model=nn.Linear(1, 1))

    def saves_after(minutes: float, step: int) -> bool:
        now[0], control = 1000.0 + 60 * minutes, SimpleNamespace()
        following.on_step_end(None, SimpleNamespace(global_step=step, max_steps=99), control)
        return bool(control.should_save)

    following.on_train_begin(None, SimpleNamespace(global_step=0), None)
    assert [saves_after(4.9, 1), saves_after(5.1, 2)] == [False, True]
    following.on_save(None, None, None)
    assert [saves_after(5.1 + 29, 3), saves_after(5.1 + 31, 4)] == [False, True]
    following._saved_s = 1000.0
    following.on_train_begin(None, SimpleNamespace(global_step=7), None)
    assert not saves_after(5.1, 8)
