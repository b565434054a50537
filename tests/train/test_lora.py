"""``train.method=lora``: adapters beside a frozen model, against PEFT's own loop."""

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outsize.checkpoint.checkpoint_state import latest
from outsize.config import Config
from outsize.errors import CheckpointError, ConfigError, ModelError
from outsize.functions import export
from outsize.model.adapters import AdapterSource, base_name, peft_config, put_in
from outsize.model.build import build_skeleton, load_hf_config
from outsize.planner.memory.step_bytes import encoded_bytes, load_bytes
from outsize.planner.search import upgrades
from outsize.planner.search.sizing import Knobs, Sizing
from outsize.session.job.prepare import Job, prepare
from outsize.session.stream import StreamedTrainer
from outsize.streamed.spec import RunSpec
from outsize.training.forecast import plan
from outsize.training.run import train
from outsize.training.run_data import open_dataset
from outsize.training.short_runs import verify
from support import make_run

pytestmark = pytest.mark.filterwarnings("ignore")
EXPERTS: dict[str, Any] = {
    "r": 2,
    "target_modules": ["q_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def lora_run(directory: Path, name: str = "llama", **sections: Any) -> Config:
    lora = {**LORA, **sections.pop("lora", {})}
    trains = {"method": "lora", **sections.pop("train", {})}
    return make_run(directory, name, train=trains, lora=lora, **sections)


RUNS: dict[str, dict[str, Any]] = {
    "host": {},
    "disk": {"memory": {"home": "disk", "slots": 2}},
    "bf16 base": {"model": {"dtype": "bf16"}},
    "bf16 base on disk, dropout": {
        "model": {"dtype": "bf16"},
        "lora": {"lora_dropout": 0.25, "use_rslora": True},
        "memory": {"home": "disk"},
    },
    "fp16 base": {"model": {"dtype": "fp16"}},
    "every linear layer": {"lora": {"target_modules": "all-linear", "init_lora_weights": "gaussian"}},
    "head trains whole": {"lora": {"modules_to_save": ["lm_head"]}, "train": {"loss": "model"}},
    "emulated, offloaded": {"memory": {"device": "emulated:1", "home": "disk", "offload": True}},
    "two workers": {"model": {"dtype": "bf16"}, "memory": {"device": "emulated:2"}},
    "4 bits": {"model": {"dtype": "bf16"}, "lora": {"base_codec": "nf4"}},
    "4 bits on disk": {
        "model": {"dtype": "bf16"},
        "lora": {"base_codec": "nf4-double", "table_codec": "int8", "lora_dropout": 0.1},
        "memory": {"home": "disk"},
    },
    "4 bits through host buffers": {
        "lora": {"base_codec": "nf4", "table_codec": "nf4"},
        "memory": {"device": "emulated:1", "home": "disk"},
    },
    "4 bits, two workers": {"lora": {"base_codec": "nf4-double"}, "memory": {"device": "emulated:2"}},
    "fp8, kept": {
        "model": {"dtype": "bf16"},
        "lora": {"base_codec": "fp8", "table_codec": "fp8"},
        "memory": {"activations": "keep"},
    },
    "fp8, fp16 on disk, two workers": {
        "model": {"dtype": "fp16"},
        "lora": {"base_codec": "fp8", "table_codec": "nf4", "lora_dropout": 0.1},
        "memory": {"device": "emulated:2", "home": "disk", "activations": "recompute"},
    },
    "experts in fp8": {
        "name": "qwen3_moe",
        "lora": {**EXPERTS, "base_codec": "fp8"},
        "memory": {"device": "emulated:1"},
    },
    "experts": {"name": "qwen3_moe", "lora": EXPERTS},
    "experts in parts, bf16, two workers": {
        "name": "qwen3_moe",
        "lora": EXPERTS,
        "model": {"dtype": "bf16"},
        "train": {"mlp_parts": 2},
        "memory": {"device": "emulated:2"},
    },
    "experts in 4 bits on disk": {
        "name": "gpt_oss",
        "lora": {**EXPERTS, "base_codec": "nf4"},
        "memory": {"device": "emulated:1", "home": "disk"},
    },
    "last layer": {"lora": {"layers_to_transform": [2]}},
}


@pytest.mark.parametrize("sections", RUNS.values(), ids=RUNS.keys())
def test_streamed_is_resident_bit_for_bit(sections: dict[str, Any], tmp_path: Path):
    result = verify(lora_run(tmp_path, **dict(sections)))
    assert result.equal, result.differing
    assert len(set(result.loss_streamed)) == 4


@pytest.mark.parametrize(
    "sections",
    [
        {"lora": {"base_codec": "nf4"}, "model": {"dtype": "bf16"}, "train": {"microbatches": 3}},
        {"lora": {"base_codec": "nf4-double", "table_codec": "int8"}, "train": {"microbatches": 2}},
        {"name": "qwen3_moe", "lora": {**EXPERTS, "base_codec": "fp8"}, "model": {"dtype": "bf16"}},
        {"lora": {"base_codec": "int8"}, "train": {"microbatches": 3, "round_microbatches": 1}},
    ],
)
def test_frozen_units_that_lie_on_the_device_encoded_are_exact_and_cross_the_link_once(
    sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def encoded(sizing: Sizing, knobs: Knobs) -> Iterator[Knobs]:
        yield replace(knobs, encoded=frozenset(u.index for u in sizing.model.units if encoded_bytes(u)))

    memory = {"device": "emulated:1", "resident": "none"}
    run = lora_run(tmp_path, memory=memory, **sections)
    monkeypatch.setattr(Sizing, "more_decoded", lambda *_: iter(()))
    moving = prepare(RunSpec.of(run, tmp_path / "run"), lambda _: None).plan
    monkeypatch.setattr(upgrades, "HOLDING", (encoded, Sizing.more_staying))
    held = prepare(RunSpec.of(run, tmp_path / "run"), lambda _: None).plan
    assert held.memory["device"]["frozen, encoded"] == held.layout.held_bytes > 0
    assert held.traffic.up <= moving.traffic.up - held.layout.held_bytes
    result = verify(run)
    assert result.equal, result.differing


def base_of(run: Config, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(run.model.path, dtype=dtype)


def newest(run: Config) -> Path:
    found = latest(Path(run.train.run_dir or ""))
    assert found is not None
    return found


def peft_loop(
    run: Config, directory: Path, dtype: torch.dtype, lora: dict[str, Any]
) -> tuple[list[float], Any]:
    """What a user of PEFT writes: one microbatch per step, clipping, torch's AdamW."""
    prepared = prepare(RunSpec.of(run, directory), lambda _: None)
    with open_dataset(run, prepared, directory, lambda _: None) as dataset:
        batches = [dataset.batch(step, run.sequences_per_step) for step in range(run.train.steps)]
    torch.manual_seed(run.train.seed)
    model = peft.get_peft_model(base_of(run, dtype), peft.LoraConfig(**lora, task_type="CAUSAL_LM"))
    trained = [p for p in model.parameters() if p.requires_grad]
    recipe = run.optimizer
    optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
    losses = []
    for batch in batches:
        loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "fp32"), ("llama", "bf16"), ("qwen3_moe", "fp32"), ("qwen3_moe", "bf16")],
)
def test_a_run_ends_where_peft_s_own_loop_ends(name: str, dtype: str, tmp_path: Path):
    """Losses, and the adapters as `PeftModel.from_pretrained` loads them, bit for bit."""
    half = torch.bfloat16 if dtype == "bf16" else torch.float32
    lora = EXPERTS if name == "qwen3_moe" else LORA
    sections = {"train": {"loss": "model", "microbatches": 1}, "memory": {"home": "disk"}, "lora": lora}
    run = lora_run(tmp_path, name, model={"dtype": dtype}, **sections)
    losses, model = peft_loop(run, tmp_path, half, lora)
    heard: list[float] = []
    train(run, progress=lambda record: heard.append(record.loss))
    assert heard == losses
    want = {name: value for name, value in model.state_dict().items() if "lora_" in name}
    loaded = peft.PeftModel.from_pretrained(base_of(run, half), newest(run))
    found = {name: value for name, value in loaded.state_dict().items() if "lora_" in name}
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], value) for name, value in want.items())
    assert not torch.equal(next(v for n, v in want.items() if "lora_B" in n), torch.zeros(()))


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_run_that_was_cut_ends_like_one_that_was_not(home: str, tmp_path: Path):
    sections: dict[str, Any] = {"model": {"dtype": "bf16"}, "memory": {"home": home}}
    whole = lora_run(tmp_path, **sections, train={"run_dir": str(tmp_path / "whole")})
    train(whole)
    train(lora_run(tmp_path, **sections, train={"steps": 2}))
    rest = lora_run(tmp_path, **sections, train={"resume": "auto"})
    result = train(rest)
    assert result.steps == 4
    one, other = (load_file(newest(run) / "adapter_model.safetensors") for run in (whole, rest))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_holds_no_weights_of_the_base(tmp_path: Path):
    run = lora_run(tmp_path, train={"steps": 1})
    train(run)
    files = {path.name: path.stat().st_size for path in newest(run).rglob("*") if path.is_file()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= files.keys()
    assert not any(name.startswith("model-") for name in files)
    config = peft.PeftConfig.from_pretrained(newest(run))
    assert config.base_model_name_or_path == run.model.path
    assert config.r == 4


@pytest.mark.parametrize(
    ("change", "key"),
    [({"lora": {"r": 2}}, "lora.r"), ({"train": {"method": "full"}}, "train.method")],
)
def test_other_adapters_do_not_go_on_with_a_run(change: dict[str, Any], key: str, tmp_path: Path):
    train(lora_run(tmp_path, train={"steps": 1}))
    sections = {**change, "train": {"resume": "auto", **change.get("train", {})}}
    with pytest.raises(ConfigError, match=key):
        train(lora_run(tmp_path, **sections))


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"target_modules": ["no_such"]}, "no_such.*the linear layers of this model are .*down_proj.*q_proj"),
        ({"modules_to_save": ["lm_head"]}, "model.dtype=fp32"),
        ({"target_parameters": ["experts.down"]}, "experts.down; the stacked experts of this model are none"),
    ],
)
def test_what_cannot_be_adapted_is_refused_before_anything_is_written(
    lora: dict[str, Any], says: str, tmp_path: Path
):
    run = lora_run(tmp_path, model={"dtype": "bf16"}, lora=lora)
    with pytest.raises(ConfigError, match=says):
        train(run)
    assert not (tmp_path / "run").exists()


def test_freezing_goes_without_saying():
    with pytest.raises(ValueError, match="the whole model is frozen"):
        Config(model={"path": "m", "freeze": ["*"]}, data={"path": "d"}, train={"method": "lora"})


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_merged_unit_by_unit_is_merged_by_peft(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lora = {"target_modules": "all-linear", "modules_to_save": ["lm_head"] if dtype == "fp32" else None}
    if name == "qwen3_moe":
        lora = {**EXPERTS}
    if dtype == "bf16":  # merged into what the checkpoint has, not into what the run computed with
        lora["base_codec"] = "fp8"
    if name == "gpt2":  # its head is tied
        lora["modules_to_save"] = None
    run = lora_run(tmp_path, name, model={"dtype": dtype}, lora=lora, train={"steps": 2, "loss": "model"})
    train(run)
    half = torch.bfloat16 if dtype == "bf16" else torch.float32
    want = peft.PeftModel.from_pretrained(base_of(run, half), newest(run)).merge_and_unload().state_dict()
    read, original = [], AdapterSource.read
    monkeypatch.setattr(AdapterSource, "read", lambda s, n, *args: read.append(n) or original(s, n, *args))
    out = export(tmp_path / "run", tmp_path / "merged", merge=True)
    stacks = [each for each in read if each.endswith(("gate_up_proj", "down_proj"))]
    assert name != "qwen3_moe" or len(stacks) == len(set(stacks)) > 0
    found = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert found.dtype == half
    state = found.state_dict()
    assert state.keys() == want.keys()
    assert all(torch.equal(state[key], value) for key, value in want.items())
    base = base_of(run, half).state_dict()
    assert any(not torch.equal(state[key], value) for key, value in base.items())
    assert (out / "tokenizer.json").is_file()


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_merged_where_that_code_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = lora_run(tmp_path, model={"trust_remote_code": True}, train={"steps": 1, "loss": "model"})
    directory = Path(run.model.path)
    (directory / "own.py").write_text(OWN_CODE)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    train(run)
    with pytest.raises(ModelError, match="trust_remote_code"):
        export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()
    out = export(tmp_path / "run", tmp_path / "merged", merge=True, trust_remote_code=True)
    assert list(out.glob("*.safetensors"))


def test_biases_that_a_model_does_not_have_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for name, told in (("llama", 1), ("qwen2", 0)):
        run = lora_run(tmp_path / name, name, lora={"bias": "all"})
        caplog.clear()
        put_in(
            build_skeleton(load_hf_config(run.model.path), "fp32"),
            peft_config(run.lora.for_peft(), "", True),
            0,
        )
        assert caplog.text.count("lora.bias=all has no effect") == told


@pytest.mark.parametrize("module", ["lm_head", "wte"])
def test_adapters_of_one_of_two_tied_modules_are_not_left_out_of_a_merged_model(module: str, tmp_path: Path):
    run = lora_run(tmp_path, "gpt2", lora={"target_modules": ["c_attn", module]}, train={"steps": 1})
    train(run)
    with pytest.raises(ModelError, match=r"wte\.weight is shared by 2 modules"):
        export(tmp_path / "run", tmp_path / "merged", merge=True)
    assert not (tmp_path / "merged").exists()


def test_there_is_nothing_to_merge_in_a_run_of_the_whole_model(tmp_path: Path):
    train(make_run(tmp_path, train={"steps": 1}))
    with pytest.raises(CheckpointError, match="nothing to merge"):
        export(tmp_path / "run", tmp_path / "merged", merge=True)


def bytes_per_step(run: Config, directory: Path) -> tuple[Job, int, int]:
    """What goes up and down in a step where nothing stays on the device, counted over all steps of ``run``."""
    memory = run.memory.model_copy(update={"slots": 2})
    prepared, moved = bytes_of_steps(run.model_copy(update={"memory": memory}), directory)
    up, down = moved["up:w0"], moved["down:w0"]
    assert (up // 3, down // 3) == (prepared.plan.traffic.up, prepared.plan.traffic.down)
    return prepared, up // 3, down // 3


def bytes_of_steps(run: Config, directory: Path) -> tuple[Job, dict[str, int]]:
    """What three steps move, by lane."""
    prepared = prepare(RunSpec.of(run, directory), lambda _: None)
    with (
        open_dataset(run, prepared, directory, lambda _: None) as dataset,
        StreamedTrainer(prepared, directory) as trainer,
    ):
        trainer.fill()
        for _ in trainer.steps(dataset.batch(step, run.sequences_per_step) for step in range(3)):
            pass
        trainer.settle()
        return prepared, dict(trainer.engine.link_bytes())


def test_frozen_weights_only_go_up(tmp_path: Path):
    """Bytes of a step: two loads of a bf16 base at 2 bytes per parameter, and no gradient of it."""
    prepared, up, down = bytes_per_step(lora_run(tmp_path, model={"dtype": "bf16"}), tmp_path)
    units = prepared.split.spec.units
    adapters = 4 * sum(unit.numel for unit in units)
    frozen = sum(part.numel for unit in units for part in unit.frozen)
    assert down == adapters  # gradients of the adapters, and of nothing else
    assert up <= 2 * (2 * frozen + adapters)


@pytest.mark.parametrize(
    ("home", "lora", "transport"),
    [
        ("host", {}, {}),
        ("host", {"base_codec": "nf4", "table_codec": "int8"}, {}),
        ("disk", {"base_codec": "nf4"}, {}),
        ("host", {}, {"weights": "lossless4"}),
    ],
)
def test_frozen_weights_that_have_room_go_up_once(
    home: str, lora: dict[str, str], transport: dict[str, str], tmp_path: Path
):
    """From the second step on what a step moves is its adapters, as planned; the first one brings all else."""
    memory = {"device": "emulated:1", "home": home}
    run = lora_run(tmp_path, model={"dtype": "bf16"}, lora=lora, memory=memory, transport=transport)
    prepared, moved = bytes_of_steps(run, tmp_path)
    units = prepared.split.spec.units
    streamed = units[: prepared.split.spec.num_streamed]
    assert prepared.plan.layout.stays == {unit.index for unit in streamed if unit.all_tensors}
    first = moved["up:w0"] - 3 * prepared.plan.traffic.up
    whole = sum(load_bytes(prepared.plan.transport, unit, "bf16") for unit in streamed)
    again = sum(load_bytes(prepared.plan.transport, unit, "bf16", stays=True) for unit in streamed)
    if transport:  # encodings of planes as small as these are longer than is planned for large ones
        assert whole - again <= first < 1.5 * (whole - again)
    else:
        assert first == whole - again > 0
        assert again == 2 * sum(unit.numel for unit in streamed if unit.trainable)


@pytest.mark.parametrize("lora", [{}, {"base_codec": "nf4"}])
def test_frozen_weights_go_up_once_to_each_of_several_workers(lora: dict[str, str], tmp_path: Path):
    memory = {"device": "emulated:2"}
    run = lora_run(tmp_path, model={"dtype": "bf16"}, lora=lora, memory=memory, train={"microbatches": 2})
    prepared, moved = bytes_of_steps(run, tmp_path)
    spec, layout = prepared.split.spec, prepared.plan.layout
    streamed = spec.units[: spec.num_streamed]
    assert layout.stages is not None
    assert layout.stays == {unit.index for unit in streamed if unit.all_tensors}
    once = sum(part.home_bytes for unit in streamed for part in unit.frozen)
    once += sum(unit.weight_bytes("bf16") for unit in streamed if not unit.trainable)
    first = sum(moved[f"up:w{worker}"] for worker in range(2)) - 3 * prepared.plan.traffic.up
    assert 0 < first <= 2 * once


@pytest.mark.parametrize(("codec", "most"), [("nf4", 0.6), ("nf4-double", 0.55), ("fp8", 1.05)])
def test_an_encoded_base_crosses_the_link_encoded(codec: str, most: float, tmp_path: Path):
    """Bytes of a step per frozen parameter and pass, as planned and as counted."""
    lora = {"base_codec": codec, "table_codec": codec}
    prepared, up, down = bytes_per_step(lora_run(tmp_path, model={"dtype": "bf16"}, lora=lora), tmp_path)
    units = prepared.split.spec.units
    adapters = 4 * sum(unit.numel for unit in units)
    encoded = [part for unit in units for part in unit.frozen if part.codec is not None]
    rest = [part for unit in units for part in unit.frozen if part.codec is None]
    assert down == adapters
    of_base = up - 2 * sum(part.num_bytes for part in rest) - 2 * adapters
    padding = 4096 * len(encoded)  # whole sectors; parts of real models are thousands of them
    assert of_base <= 2 * (most * sum(part.numel for part in encoded) + padding)


@pytest.mark.parametrize(("codec", "least", "most"), [("nf4", 0.07, 0.12), ("fp8", 0.02, 0.03)])
def test_the_error_of_an_encoded_base_is_told_and_kept(codec: str, least: float, most: float, tmp_path: Path):
    run = lora_run(tmp_path, lora={"base_codec": codec}, train={"steps": 1})
    said: list[str] = []
    train(run, announce=said.append)
    errors = json.loads((tmp_path / "run" / "quantisation.json").read_text())
    matrices = [n for n in base_of(run).state_dict() if "layers" in n and "norm" not in n]
    assert {base_name(name) for name in errors} == set(matrices)
    assert all(least < error < most for error in errors.values())
    assert [line for line in said if "root mean square error" in line]


@pytest.mark.parametrize("codec", ["nf4-double", "fp8"])
def test_a_run_with_an_encoded_base_goes_on(codec: str, tmp_path: Path):
    sections: dict[str, Any] = {"lora": {"base_codec": codec}, "memory": {"home": "disk"}}
    whole = lora_run(tmp_path, **sections, train={"run_dir": str(tmp_path / "whole")})
    train(whole)
    train(lora_run(tmp_path, **sections, train={"steps": 2}))
    rest = lora_run(tmp_path, **sections, train={"resume": "auto"})
    train(rest)
    one, other = (load_file(newest(run) / "adapter_model.safetensors") for run in (whole, rest))
    assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ConfigError, match=r"lora\.base_codec"):
        train(lora_run(tmp_path, train={"resume": "auto"}, memory={"home": "disk"}))


def test_the_parts_of_a_home_of_encoded_weights_are_the_home(tmp_path: Path) -> None:
    memory, lora = {"device": "emulated:1"}, {"method": "lora"}
    for codec in ("raw", "lossless4"):
        run = make_run(
            tmp_path, model={"dtype": "bf16"}, train=lora, memory=memory, transport={"weights": codec}
        )
        found = plan(run)
        assert sum(found.home_parts.values()) == found.memory["host"]["home"]
