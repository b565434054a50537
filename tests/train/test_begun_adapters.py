"""A run that begins with adapters that exist, or goes on from a Trainer's checkpoint of adapters."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import outsize
from outsize.checkpoint.checkpoint_state import latest
from outsize.config import Config, load_config
from outsize.data.chat import CHATML_TEMPLATE
from outsize.errors import CheckpointError, ConfigError, InfeasiblePlanError, OutsizeError
from outsize.functions import export
from outsize.session import run_state
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import preview
from outsize.training.run import train
from outsize.training.run_data import open_dataset
from outsize.training.short_runs import verify
from support import make_model_dir, make_run

pytestmark = pytest.mark.filterwarnings("ignore")
BEFORE, STEPS, SEQUENCES = 2, 4, 4
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "layers": ("llama", LORA),
    "a head and norms": ("llama", {**LORA, "modules_to_save": ["lm_head", "norm"]}),
    "biases": ("qwen2", {"r": 4, "target_modules": ["q_proj"], "bias": "all"}),
    "experts": (
        "qwen3_moe",
        {
            "r": 2,
            "target_modules": ["q_proj"],
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
    "a scale by the root": ("llama", {**LORA, "use_rslora": True, "rank_pattern": {"q_proj": 2}}),
}


class InOrder(Trainer):
    """Takes the rows as they come."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def run_of(directory: Path, name: str = "llama", lora: dict[str, Any] | None = None, **trains: Any) -> Config:
    section = {"method": "lora", "steps": STEPS, "microbatches": 1, "loss": "model", **trains}
    return make_run(directory, name, train=section, lora=lora or {})


def rows_of(config: Config, directory: Path) -> list[dict[str, Tensor]]:
    """The sequences of a run, in its order."""
    full = config.model_copy(update={"train": config.train.model_copy(update={"method": "full"})})
    prepared = prepare(RunSpec.of(full, directory), lambda _: None)
    with open_dataset(full, prepared, directory, lambda _: None) as dataset:
        batches = [dataset.batch(step, SEQUENCES) for step in range(STEPS)]
    return [
        {"input_ids": ids, "labels": labels}
        for batch in batches
        for ids, labels in zip(batch.input_ids.clone(), batch.labels.clone(), strict=True)
    ]


def adapted(config: Config, lora: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.02)
    return model


def trainers(config: Config, lora: dict[str, Any], directory: Path, steps: int, **more: Any) -> Any:
    """Train with the Trainer; returns it."""
    optimizer = config.optimizer
    arguments = {
        "output_dir": str(directory),
        "max_steps": steps,
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
    }
    rows = rows_of(config, directory / "rows")
    made = InOrder(
        model=adapted(config, lora), args=TrainingArguments(**arguments), train_dataset=rows, **more
    )
    made.train()
    return made


def newest(config: Config) -> Path:
    found = latest(Path(config.train.run_dir or ""))
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "lora"), KINDS.values(), ids=KINDS.keys())
def test_adapters_of_the_trainer_go_on_as_with_the_trainer(name: str, lora: dict[str, Any], tmp_path: Path):
    """Of 4 steps the Trainer makes all, or 2 and outsize the others: losses and adapters are the same."""
    config = run_of(tmp_path, name)
    whole = trainers(config, lora, tmp_path / "theirs", STEPS)
    checkpoint = tmp_path / "theirs" / f"checkpoint-{BEFORE}"
    losses: list[float] = []
    resumed = run_of(tmp_path, name, resume=str(checkpoint))
    train(resumed, progress=lambda record: losses.append(record.loss))
    logged = [line["loss"] for line in whole.state.log_history if "loss" in line]
    assert losses == pytest.approx(logged[BEFORE:], rel=1e-3)  # the Trainer rounds what it logs
    ours = load_file(newest(resumed) / "adapter_model.safetensors")
    theirs = load_file(tmp_path / "theirs" / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    # and from there as any other run, with its own checkpoint
    again = run_of(
        tmp_path,
        name,
        load_config(tmp_path / "run" / "config.yaml").lora.model_dump(),
        steps=5,
        resume="auto",
    )
    assert train(again).steps == 5


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, and adapters of it."""
    directory = tmp_path_factory.mktemp("begun")
    config = run_of(directory)
    trainers(config, LORA, directory / "theirs", BEFORE)
    adapted(config, LORA).save_pretrained(directory / "adapters")
    return directory


def test_a_checkpoint_of_adapters_does_not_go_on_with_the_whole_model(begun: Path, tmp_path: Path):
    config = run_of(begun, method="full", resume=str(begun / "theirs"), run_dir=str(tmp_path / "run"))
    with pytest.raises(ConfigError, match=r"Trainer's checkpoint of adapters.*train.method=lora"):
        train(config)


def losses_of_peft(config: Config, adapters: Path, directory: Path) -> list[float]:
    """Losses of PEFT's model of adapters, trained in a loop of torch."""
    base = AutoModelForCausalLM.from_pretrained(config.model.path)
    model = peft.PeftModel.from_pretrained(base, adapters, is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    recipe = config.optimizer
    optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
    losses, rows = [], rows_of(config, directory)
    for step in range(config.train.steps):
        part = rows[step * SEQUENCES : (step + 1) * SEQUENCES]
        loss = model(**{key: torch.stack([row[key] for row in part]) for key in part[0]}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_run_begins_with_adapters_as_pefts_own_loop_does(begun: Path, tmp_path: Path):
    config = run_of(begun, lora={"from": str(begun / "adapters")}, run_dir=str(tmp_path / "run"))
    losses: list[float] = []
    train(config, progress=lambda record: losses.append(record.loss))
    assert losses == losses_of_peft(config, begun / "adapters", tmp_path / "rows")
    told = load_config(tmp_path / "run" / "config.yaml").lora
    assert (told.r, told.lora_alpha, told.target_modules) == (4, 6, ("down_proj", "q_proj"))


# Of one adapter of rank 4: what PEFT, its older versions and other programs write of it.
WRITTEN: dict[str, dict[str, Any]] = {
    "a fraction": {"lora_alpha": 0.5},
    "a whole number with a point": {"lora_alpha": 16.0},
    "fractions by name": {"alpha_pattern": {"q_proj": 1.5}},
    "all layers, as a pattern": {"layers_to_transform": [0, 1, 2], "layers_pattern": ["layers"]},
    "another pattern": {"layers_to_transform": [0, 1, 2], "layers_pattern": ""},
    "no beginning": {"init_lora_weights": None},
    "nothing of the way round": {"fan_in_fan_out": None},
    "a key of another version": {"use_something": True},
    "a pattern of names": {"target_modules": r".*\.(q|down)_proj"},
}


@pytest.mark.parametrize("entries", WRITTEN.values(), ids=WRITTEN.keys())
def test_however_a_configuration_of_adapters_is_written_it_trains_as_with_peft(
    entries: dict[str, Any], begun: Path, tmp_path: Path
):
    adapters = shutil.copytree(begun / "adapters", tmp_path / "adapters")
    changed(adapters, **entries)
    losses: list[float] = []
    config = run_of(begun, lora={"from": str(adapters)}, steps=2, run_dir=str(tmp_path / "run"))
    train(config, progress=lambda record: losses.append(record.loss))
    assert losses == losses_of_peft(config, adapters, tmp_path / "rows")
    assert train(run_of(begun, lora={"from": str(adapters)}, run_dir=str(tmp_path / "run"), resume="auto"))


def test_adapters_of_one_layer_by_its_number_alone_are_taken(begun: Path, tmp_path: Path):
    adapted(run_of(begun), {**LORA, "layers_to_transform": 1}).save_pretrained(tmp_path / "adapters")
    losses: list[float] = []
    config = run_of(begun, lora={"from": str(tmp_path / "adapters")}, run_dir=str(tmp_path / "run"))
    train(config, progress=lambda record: losses.append(record.loss))
    assert losses == losses_of_peft(config, tmp_path / "adapters", tmp_path / "rows")


@pytest.mark.parametrize("home", ["host", "disk"])
def test_such_a_run_goes_on_when_those_adapters_are_gone(home: str, begun: Path, tmp_path: Path):
    shutil.copytree(begun / "adapters", tmp_path / "adapters")

    def run(name: str, **trains: Any) -> Config:
        made = run_of(
            begun, lora={"from": str(tmp_path / "adapters")}, run_dir=str(tmp_path / name), **trains
        )
        return made.model_copy(update={"memory": made.memory.model_copy(update={"home": home})})

    train(run("whole"))
    train(run("cut", steps=2))
    shutil.rmtree(tmp_path / "adapters")
    assert train(run("cut", resume="auto")).steps == STEPS
    one, other = (load_file(newest(run(name)) / "adapter_model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_run_begins_with_what_another_run_has_trained(begun: Path, tmp_path: Path):
    first = run_of(begun, lora=LORA, run_dir=str(tmp_path / "first"))
    train(first)
    losses: list[float] = []
    second = run_of(begun, lora={"from": str(tmp_path / "first")}, steps=1, run_dir=str(tmp_path / "second"))
    train(second, progress=lambda record: losses.append(record.loss))
    base = AutoModelForCausalLM.from_pretrained(first.model.path)
    model = peft.PeftModel.from_pretrained(base, newest(first)).eval()
    rows = rows_of(second, tmp_path / "rows")[:SEQUENCES]
    assert losses == [model(**{k: torch.stack([row[k] for row in rows]) for k in rows[0]}).loss.item()]


def losses_by(run: Any, lines: list[str]) -> list[float]:
    losses: list[float] = []
    outsize.train(run, progress=lambda record: losses.append(record.loss), announce=lines.append)
    return losses


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_takes_for_a_model_what_generate_takes(method: str, begun: Path, tmp_path: Path):
    first = run_of(begun, lora=LORA if method == "lora" else {}, steps=2, method=method)
    first = first.model_copy(
        update={"train": first.train.model_copy(update={"run_dir": str(tmp_path / "first")})}
    )
    train(first)
    export(tmp_path / "first", tmp_path / "export")

    def losses_of(place: Path) -> list[float]:
        tree = first.model_dump(exclude={"lora", "train"}) | {
            "model": {"path": str(place)},
            "train": {
                "steps": 2,
                "tokens_per_step": 64,
                "microbatches": 1,
                "run_dir": str(tmp_path / f"of-{place.name}"),
            },
        }
        lines: list[str] = []
        losses = losses_by(tree, lines)
        told = load_config(tmp_path / f"of-{place.name}" / "config.yaml")
        assert told.train.method == method
        assert any("is a run" in line for line in lines) == (place.name == "first")
        return losses

    by_run = losses_of(tmp_path / "first")
    assert by_run == losses_of(newest(first)) == losses_of(tmp_path / "export")
    if method == "lora":
        named = run_of(
            begun,
            lora={"from": str(tmp_path / "first")},
            loss="auto",
            steps=2,
            seed=0,
            run_dir=str(tmp_path / "named"),
        )
        assert by_run == losses_by(named, [])


@pytest.mark.parametrize("command", [outsize.train, outsize.verify])
def test_what_is_refused_leaves_no_tokens(command: Any, begun: Path, tmp_path: Path):
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    config = make_run(begun, data={"path": str(chats)}, memory={"device_memory": 2**16})
    config = config.model_copy(update={"data": type(config.data)(path=str(chats))})
    config = config.model_copy(
        update={"train": config.train.model_copy(update={"run_dir": str(tmp_path / "runs" / "a")})}
    )
    with pytest.raises(InfeasiblePlanError):
        command(config)
    assert list(tmp_path.iterdir()) == [chats]


def test_verify_begins_with_adapters_too(begun: Path):
    assert verify(run_of(begun, lora={"from": str(begun / "adapters")})).equal


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"r": 2}, r"lora.r: .*have 4, not 2"),
        ({"target_modules": "all-linear"}, "lora.target_modules: .*down_proj"),
    ],
)
def test_other_settings_than_those_of_the_adapters_are_refused(said: dict[str, Any], key: str, begun: Path):
    with pytest.raises(ConfigError, match=key):
        outsize.plan(run_of(begun, lora={"from": str(begun / "adapters"), **said}))


def test_the_same_settings_in_other_words_and_another_dropout_are_taken(begun: Path):
    said = {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1}
    assert outsize.plan(run_of(begun, lora={"from": str(begun / "adapters"), **said}))


def changed(directory: Path, **entries: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def without_rank(directory: Path) -> None:
    kept = load_file(directory / "adapter_model.safetensors")
    save_file(dict(list(kept.items())[1:]), directory / "adapter_model.safetensors")


def with_embedding(directory: Path) -> None:
    kept = load_file(directory / "adapter_model.safetensors")
    kept["base_model.model.model.embed_tokens.weight"] = torch.zeros(264, 32)
    save_file(kept, directory / "adapter_model.safetensors")


REFUSED = {
    "dora": (lambda d: changed(d, use_dora=True), "use_dora.*outsize.wrap"),
    "pissa": (lambda d: changed(d, init_lora_weights="pissa"), "init_lora_weights=pissa.*outsize.wrap"),
    "tokens": (lambda d: changed(d, trainable_token_indices=[1]), "trainable_token_indices.*outsize.wrap"),
    "another kind": (lambda d: changed(d, peft_type="LOHA"), "kind LOHA.*outsize.wrap"),
    "a weight missing": (without_rank, "is missing"),
    "embeddings as well": (with_embedding, "more than adapters that train .*embed_tokens"),
    "a value that cannot be": (lambda d: changed(d, bias="some"), "adapter_config.json: bias: must be none"),
    "nothing": (lambda d: (d / "adapter_config.json").unlink(), "lora.from: .* holds no adapters"),
}


@pytest.mark.parametrize(("change", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_trained_on_exactly_is_refused_before_anything_is_written(
    change: Any, says: str, begun: Path, tmp_path: Path
):
    shutil.copytree(begun / "adapters", tmp_path / "adapters")
    change(tmp_path / "adapters")
    with pytest.raises(OutsizeError, match=says) as told:
        train(run_of(begun, lora={"from": str(tmp_path / "adapters")}, run_dir=str(tmp_path / "run")))
    assert "resume" not in str(told.value)
    assert not (tmp_path / "run").exists()


def test_adapters_as_the_model_beside_other_adapters_are_refused(begun: Path, tmp_path: Path):
    other = shutil.copytree(begun / "adapters", tmp_path / "other")
    config = run_of(begun, lora={"from": str(other)}, run_dir=str(tmp_path / "run"))
    model = config.model.model_copy(update={"path": str(begun / "adapters")})
    with pytest.raises(ConfigError, match=r"model.path: .* holds adapters, and lora.from names others"):
        outsize.train(config.model_copy(update={"model": model}))
    assert not (tmp_path / "run").exists()


def test_adapters_of_another_model_than_is_trained_are_told(begun: Path, tmp_path: Path):
    other = make_model_dir(tmp_path / "other", "llama")
    config = run_of(begun, lora={"from": str(begun / "adapters")}, steps=1, run_dir=str(tmp_path / "run"))
    moved = config.model_copy(update={"model": config.model.model_copy(update={"path": str(other)})})
    said: list[str] = []
    train(moved, announce=said.append)
    assert [
        line
        for line in said
        if re.search(r"note: .*holds adapters of .*model, and model.path is .*other", line)
    ]


def test_the_tokenizer_beside_adapters_is_the_one_of_the_run(begun: Path, tmp_path: Path):
    shutil.copytree(begun / "adapters", tmp_path / "adapters")
    tokenizer = AutoTokenizer.from_pretrained(run_of(begun).model.path)
    tokenizer.chat_template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "adapters")
    config = run_of(begun, lora={"from": str(tmp_path / "adapters")}, steps=1, run_dir=str(tmp_path / "run"))
    train(config)
    assert AutoTokenizer.from_pretrained(newest(config)).chat_template == tokenizer.chat_template
    merged = export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert AutoTokenizer.from_pretrained(merged).chat_template == tokenizer.chat_template


@pytest.mark.parametrize("chosen", [None, "chatml"])
def test_a_template_that_lies_alone_beside_adapters_is_the_one_of_the_run(
    chosen: str | None, begun: Path, tmp_path: Path
):
    """Unless another is chosen; `outsize data` shows what the run trains on."""
    shutil.copytree(begun / "adapters", tmp_path / "adapters")
    template = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    (tmp_path / "adapters" / "chat_template.jinja").write_text(template)
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    config = run_of(begun, lora={"from": str(tmp_path / "adapters")}, steps=1, run_dir=str(tmp_path / "run"))
    data = config.data.model_copy(update={"path": str(tmp_path / "chats.jsonl"), "template": chosen})
    config = config.model_copy(update={"data": data})
    shown = json.dumps(preview(config, lambda _: None)["sources"])
    assert ("<question>" in shown, "<|im_start|>" in shown) == (chosen is None, chosen is not None)
    train(config)
    want = template if chosen is None else CHATML_TEMPLATE
    assert AutoTokenizer.from_pretrained(newest(config)).chat_template == want
    more = config.train.model_copy(update={"steps": 2, "resume": "auto"})
    assert train(config.model_copy(update={"train": more})).steps == 2


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_over_a_run_goes_on_with_what_it_began_with(method: str, begun: Path, tmp_path: Path):
    """Though that run has a better checkpoint by now."""

    def run(name: str, model: Path, steps: int, **trains: Any) -> list[str]:
        made = run_of(begun, lora=LORA if method == "lora" else {}, steps=steps, method=method, **trains)
        tree = made.model_dump(exclude_unset=True, by_alias=True)
        tree["train"]["run_dir"], tree["model"]["path"] = str(tmp_path / name), str(model)
        lines: list[str] = []
        outsize.train(tree, announce=lines.append)
        return lines

    base, first = begun / "model", tmp_path / "first"
    run("first", base, 1)
    run("second", first, 1)
    run("named", latest(first) or base, 2)
    run("first", base, 2, resume="auto")
    assert any(
        "goes on, as it began, with its weights in" in line for line in run("second", first, 2, resume="auto")
    )
    name = "adapter_model.safetensors" if method == "lora" else "model-*.safetensors"
    files = [sorted((latest(tmp_path / each) or base).glob(name)) for each in ("second", "named")]
    assert files[0]
    for one, other in zip(*files, strict=True):
        tensors = load_file(other)
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in load_file(one).items())


def test_adapters_of_the_hub_are_a_model_too(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cache = tmp_path / "cache" / "models--some--adapters"
    shutil.copytree(begun / "adapters", cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    config = run_of(begun)
    tree = config.model_dump(exclude={"lora", "train"}) | {"model": {"path": "some/adapters"}}
    found = outsize.functions.config_of(tree)
    assert (found.train.method, found.lora.begins_with) == ("lora", "some/adapters")
    assert Path(found.model.path).resolve() == (begun / "model").resolve()
    absent = {**tree, "model": {"path": "some/absent"}}
    with pytest.raises(OutsizeError, match="no directory some/absent"):
        outsize.plan(absent)


def test_adapters_name_their_model_from_wherever_they_are_loaded(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(begun)
    config = run_of(begun, lora=LORA, steps=1, run_dir=str(tmp_path / "run"))
    train(config.model_copy(update={"model": config.model.model_copy(update={"path": "model"})}))
    named = peft.PeftConfig.from_pretrained(newest(config)).base_model_name_or_path
    assert named == str((begun / "model").resolve())
    with pytest.raises(CheckpointError, match=r"holds adapters.*lora.from="):
        outsize.plan(
            run_of(begun, method="full").model_copy(
                update={"model": config.model.model_copy(update={"path": str(newest(config))})}
            )
        )


def test_another_checkpoint_of_a_run_is_no_model_that_has_moved(tmp_path: Path):
    """A run over a run's weights would go on over others, where the ones that it began with have been removed."""
    begun, later, moved = (tmp_path / name / "checkpoints" / step for name, step in ("a1", "a2", "b1"))
    for there in (later, moved):
        there.mkdir(parents=True)
    assert run_state._has_moved(str(begun), str(moved), True)
    assert not run_state._has_moved(str(begun), str(later), True)
