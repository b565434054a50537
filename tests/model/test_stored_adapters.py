"""Every directory of adapters that PEFT loads: its logits bit for bit, or a refusal that says why."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTForImageClassification

import outsize
from outsize.errors import CheckpointError, ConfigError, ModelError, OutsizeError
from outsize.model.adapters import base_name
from outsize.wrapped.module import runner_of
from peft_members import IDS, KINDS, SETTINGS, UNBUILT, WAYS, Member
from support import make_model_dir

pytestmark = pytest.mark.filterwarnings("ignore")
MEMBERS = {**KINDS, **SETTINGS, **WAYS}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROOM = {"device": "cpu", "home": "host", "device_memory": "256MiB", "host_memory": "256MiB"}
SMALL_ROOM = {
    **ROOM,
    "device": "emulated:1",
    "home": "disk",
    "device_memory": "16MiB",
    "disk_memory": "64MiB",
}


@pytest.fixture(scope="module")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        if (root / name).exists():
            return root / name
        return make_model_dir(root / name, name, **({"num_hidden_layers": 2} if name == "llama" else {}))

    return made


def logits_of(directory: Path | str, **options: Any) -> torch.Tensor:
    model = outsize.load(directory, trainable=False, **{**ROOM, **options})
    try:
        with torch.no_grad():
            return model(input_ids=IDS).logits.clone()
    finally:
        runner_of(model).close()


@pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())
def test_what_peft_loads_has_its_logits_or_is_refused_by_name(
    member: Member, base_of: Callable[[str], Path], tmp_path: Path
):
    base = base_of(member.model)
    member.save(base, tmp_path / "adapters")
    if member.refused is not None:
        with pytest.raises(OutsizeError, match=member.refused) as told:
            logits_of(tmp_path / "adapters")
        assert "resume" not in str(told.value)
        return
    for name, dtype in DTYPES.items():
        want = member.logits(base, tmp_path / "adapters", dtype)
        got = logits_of(tmp_path / "adapters", dtype=name)
        assert got.dtype == want.dtype
        assert torch.equal(got, want), name


@pytest.mark.parametrize(
    "name", ["VERA llama", "SHIRA llama", "begun pissa", "some tokens", "resized", "experts"]
)
def test_logits_are_the_same_in_a_small_memory_over_a_disk(
    name: str, base_of: Callable[[str], Path], tmp_path: Path
):
    member = MEMBERS[name]
    member.save(base_of(member.model), tmp_path / "adapters")
    assert torch.equal(logits_of(tmp_path / "adapters", **SMALL_ROOM), logits_of(tmp_path / "adapters"))


@pytest.mark.parametrize("name", ["LORA llama", "OFT llama", "HRA llama", "LOKR llama", "GLORA llama"])
def test_a_codec_of_the_model_leaves_adapters_as_they_are(
    name: str, base_of: Callable[[str], Path], tmp_path: Path
):
    member = MEMBERS[name]
    member.save(base_of(member.model), tmp_path / "adapters")
    model = outsize.load(tmp_path / "adapters", trainable=False, base_codec="nf4", **ROOM)
    encoded = {base_name(name) for name in model.quantisation_errors()}
    assert encoded
    assert encoded <= dict(member.plain(base_of(member.model)).named_parameters()).keys()
    runner_of(model).close()


@pytest.mark.parametrize("name", ["LORA llama", "ADAPTION_PROMPT llama", "VBLORA gpt2", "resized, tied"])
def test_tokens_are_those_that_peft_generates(name: str, base_of: Callable[[str], Path], tmp_path: Path):
    member = MEMBERS[name]
    member.save(base_of(member.model), tmp_path / "adapters")
    model = outsize.load(tmp_path / "adapters", trainable=False, **ROOM)
    asked: dict[str, Any] = {"input_ids": IDS[:1], "max_new_tokens": 6, "do_sample": False}
    want = member.loaded(base_of(member.model), tmp_path / "adapters").generate(**asked)
    assert torch.equal(model.generate(**asked), want)
    runner_of(model).close()


def test_every_kind_that_peft_has_is_in_the_table():
    assert {name.split()[0] for name in KINDS} | UNBUILT == {each.value for each in peft.PeftType} & {
        each.value for each in peft.PEFT_TYPE_TO_CONFIG_MAPPING
    }


def test_the_documentation_counts_the_table():
    text = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    refused = sum(member.refused is not None for member in MEMBERS.values())
    equal = len(MEMBERS) - refused
    counts = f"{len(MEMBERS)} directories of adapters: {equal} with PEFT's logits, {refused} refused by name"
    compared = f"{equal} in {len(DTYPES)} dtypes are {equal * len(DTYPES)} comparisons"
    assert f"{counts}; {compared}" in " ".join(text.split())


@pytest.fixture
def plain(base_of: Callable[[str], Path], tmp_path: Path) -> Path:
    """Plain LoRA of a model that is not where they say."""
    Member().save(base_of("llama"), tmp_path / "adapters")
    change(tmp_path / "adapters", base_model_name_or_path="/workspace/models/Llama-3.1-8B")
    return tmp_path / "adapters"


def change(directory: Path, **entries: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_the_model_of_another_machine_is_named_with_its_place_and_can_be_said(
    plain: Path, base_of: Callable[[str], Path]
):
    with pytest.raises(
        CheckpointError, match=r"adapter_config.json names /workspace/models/Llama-3.1-8B.*--base"
    ):
        logits_of(plain)
    want = Member().logits(base_of("llama"), plain)
    assert torch.equal(logits_of(plain, base=base_of("llama")), want)


def test_adapters_that_name_no_model_say_where_it_would_stand(plain: Path):
    change(plain, base_model_name_or_path=None)
    with pytest.raises(CheckpointError, match=r"names no model \(base_model_name_or_path\).*--base"):
        logits_of(plain)


def test_adapters_that_name_a_class_in_place_of_a_task_are_taken_if_it_predicts_tokens(
    plain: Path, base_of: Callable[[str], Path]
):
    for name in ("LlamaForCausalLM", "LlamaModel"):
        change(plain, task_type=None, auto_mapping={"base_model_class": name}, base_model_name_or_path=None)
        assert torch.equal(logits_of(plain, base=base_of("llama")), Member().logits(base_of("llama"), plain))
    change(plain, auto_mapping={"base_model_class": "LlamaForSequenceClassification"})
    with pytest.raises(ModelError, match="of the class LlamaForSequenceClassification"):
        logits_of(plain, base=base_of("llama"))


def test_a_base_without_adapters_is_refused(base_of: Callable[[str], Path]):
    with pytest.raises(ConfigError, match="holds none"):
        logits_of(base_of("llama"), base=base_of("gpt2"))


def test_named_adapters_are_listed(plain: Path, tmp_path: Path, base_of: Callable[[str], Path]):
    shutil.copytree(plain, tmp_path / "both" / "mine")
    shutil.copytree(plain, tmp_path / "both" / "other")
    with pytest.raises(
        CheckpointError, match=r"adapters by name \(mine, other\): give one of them, e.g. .*mine"
    ):
        logits_of(tmp_path / "both")
    assert logits_of(tmp_path / "both" / "mine", base=base_of("llama")).shape == (2, 9, 264)


def test_adapters_of_another_model_are_refused(plain: Path, base_of: Callable[[str], Path]):
    with pytest.raises(CheckpointError, match=r"for another model than .*gpt2"):
        logits_of(plain, base=base_of("gpt2"))


def test_adapters_of_a_wider_model_are_refused(plain: Path, tmp_path: Path):
    wide = make_model_dir(tmp_path / "wide", "llama", hidden_size=64)
    with pytest.raises(CheckpointError, match=r"cannot be put into .*wide"):
        logits_of(plain, base=wide)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "cannot be read"), ("[]", "cannot be read"), ('{"peft_type": "NEW"}', "cannot be read")],
)
def test_a_configuration_that_is_none_is_refused(text: str, says: str, plain: Path):
    (plain / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=says):
        logits_of(plain)


def test_weights_that_run_code_are_refused(plain: Path, base_of: Callable[[str], Path]):
    (plain / "adapter_model.safetensors").unlink()
    torch.save({"base_model.model.x": print}, plain / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"cannot be read.*as safetensors"):
        logits_of(plain, base=base_of("llama"))


def test_adapters_without_weights_are_refused(plain: Path):
    (plain / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is missing"):
        logits_of(plain)


def test_a_base_in_the_hubs_cache_is_taken_at_the_revision_that_adapters_name(
    plain: Path, base_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The cache is laid out as the hub's client lays it out; nothing is asked of the network."""
    cache = tmp_path / "cache" / "models--some--llama"
    for name, commit, place in (("main", "0" * 40, "gpt2"), ("tuned", "1" * 40, "llama")):
        shutil.copytree(base_of(place), cache / "snapshots" / commit)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    change(plain, base_model_name_or_path="some/llama", revision="tuned")
    assert torch.equal(logits_of(plain), Member().logits(base_of("llama"), plain))
    change(plain, base_model_name_or_path="some/other", revision=None)
    with pytest.raises(CheckpointError, match=r"adapter_config.json names some/other.*--base"):
        logits_of(plain)


def test_adapters_in_the_hubs_cache_are_found_by_their_id(
    plain: Path, base_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path / "cache" / "models--some--adapters"
    change(plain, base_model_name_or_path=str(base_of("llama")))
    shutil.copytree(plain, cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert torch.equal(logits_of("some/adapters"), logits_of(plain))


def test_training_over_adapters_names_their_model_where_it_is_missing(plain: Path, tmp_path: Path):
    with pytest.raises((CheckpointError, ModelError), match=r"names \S+ as the model of the adapters"):
        outsize.plan({"model": {"path": str(plain)}, "data": {"path": str(tmp_path)}})


@pytest.mark.parametrize("task", ["SEQ_2_SEQ_LM", None])
def test_adapters_of_an_encoder_and_decoder_have_peft_s_logits(task: str | None, tmp_path: Path):
    config = T5Config(
        vocab_size=264, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    plain = T5ForConditionalGeneration(config).eval()
    plain.save_pretrained(tmp_path / "base")
    plain = T5ForConditionalGeneration.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(
        plain, peft.LoraConfig(task_type=task, r=4, target_modules=["q", "v", "wo"])
    )
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    adapted.eval().save_pretrained(tmp_path / "adapters")
    asked = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
    with torch.no_grad():
        want = adapted(**asked).logits
    model = outsize.load(tmp_path / "adapters", trainable=False, dtype="fp32", **ROOM)
    with torch.no_grad():
        assert torch.equal(model(**asked).logits, want)
    runner_of(model).close()


def test_adapters_of_a_model_of_images_are_refused_by_its_kind(tmp_path: Path):
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "base")
    plain = ViTForImageClassification.from_pretrained(tmp_path / "base")
    names = {name.rpartition(".")[2] for name, each in plain.named_modules() if isinstance(each, nn.Linear)}
    adapted = peft.get_peft_model(plain, peft.LoraConfig(r=4, target_modules=sorted(names - {"classifier"})))
    adapted.save_pretrained(tmp_path / "adapters")
    with pytest.raises(ModelError, match="vit is not a language model"):
        outsize.load(tmp_path / "adapters", trainable=False, **ROOM)
