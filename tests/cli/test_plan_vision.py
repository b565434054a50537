"""`outsize plan` of vision-language models by the pixels of an image: its tokens, and FLOPs that torch counts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import outsize
import zoo_of_lists
from cli.test_plan import answer
from counting import counted
from outsize.errors import ConfigError
from outsize.model.build import build_skeleton
from outsize.session.job.demand import ImageInputs
from outsize.session.job.known_models import IMAGE

pytestmark = pytest.mark.filterwarnings("default")
TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64,
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
CLIP = {
    **VISION,
    "model_type": "clip_vision_model",
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 32,
}
SIGLIP = {**CLIP, "model_type": "siglip_vision_model", "vision_use_head": False}
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}


# By hand, from each family's rule at its usual settings: patches, those merged, tiles, and ends of rows.
@pytest.mark.parametrize(
    ("kind", "vision", "more", "pixels", "want"),
    [
        ("qwen2_vl", {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 32}, {}, (448, 336), 16 * 12),
        ("qwen2_5_vl", {**QWEN, "fullatt_block_indexes": [0]}, {}, (640, 480), 23 * 17),
        ("qwen3_vl", {**QWEN, "deepstack_visual_indexes": [0]}, {}, (640, 480), 20 * 15),
        ("llava", CLIP, {}, (800, 600), 576),
        ("llava_next", CLIP, {}, (640, 480), 2340),
        ("paligemma", {**SIGLIP, "image_size": 448}, {"projection_dim": 32}, (800, 600), 1024),
        ("gemma3", {**SIGLIP, "image_size": 896}, {}, (800, 600), 256),
        ("smolvlm", {**VISION, "image_size": 512, "patch_size": 16}, {"scale_factor": 4}, (1024, 512), 9 * 64),
        ("idefics3", {**VISION, "image_size": 364, "patch_size": 14}, {"scale_factor": 2}, (728, 728), 17 * 169),
        ("internvl", {**VISION, "image_size": [448] * 2, "patch_size": [14] * 2}, {}, (896, 448), 3 * 256),
        ("mistral3", {**VISION, "model_type": "pixtral", "image_size": 1540, "patch_size": 14}, {}, (784, 560), 560),
    ],
)  # fmt: skip
def test_tokens_of_an_image_are_those_of_the_processors(
    kind: str, vision: Mapping[str, Any], more: Mapping[str, Any], pixels: tuple[int, int], want: int
):
    text = {"llava": "llama", "llava_next": "llama", "paligemma": "gemma", "gemma3": "gemma3_text"}.get(kind)
    text = {"smolvlm": "llama", "idefics3": "llama", "internvl": "qwen2", "mistral3": "mistral"}.get(
        kind, text
    )
    parts = {"text_config": TEXT | ({"model_type": text} if text else {}), "vision_config": dict(vision)}
    config = transformers.CONFIG_MAPPING[kind].from_dict(parts | dict(more))
    model = build_skeleton(config, "fp32", auto="AutoModelForImageTextToText")
    assert ImageInputs(model, {"pixels": pixels, "settings": {}}).tokens == want


@pytest.mark.parametrize("name", ["gemma3", "llava_next", "qwen2_5_vl"])
def test_flops_are_those_that_torch_counts_of_a_real_image(name: str):
    model = zoo_of_lists.build(name)[0]
    image = {"pixels": [32, 24], "settings": {}}
    inputs = ImageInputs(model, image)
    seq_len = inputs.tokens + 300
    counts = counted({**model.config.to_dict(), IMAGE: image}, "fp32", seq_len=seq_len)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**inputs(1, seq_len))
    by_module = {name.partition(".")[2]: sum(kinds.values()) for name, kinds in counter.flop_counts.items()}
    work = counts.workload(1, seq_len)
    for unit, flops in zip(counts.spec.units, work.forward_flops, strict=False):
        want = by_module.get(unit.name, 0)
        if "language_model.layers" in unit.name and name in ("llava_next", "qwen2_5_vl"):
            want -= 2 * seq_len**2 * 32  # a causal kernel leaves out half of what a mask hides
        assert flops == pytest.approx(want, rel=0.02, abs=64), unit.name
    twice = counts.workload(2, seq_len)
    assert sum(twice.forward_flops) == pytest.approx(2 * sum(work.forward_flops))
    assert twice.boundary_bytes == tuple(2 * size for size in work.boundary_bytes)


def test_a_model_is_planned_with_an_image_in_each_sequence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = zoo_of_lists.build("paligemma")[0].config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = (tmp_path, "--gpus", "4090", "--image", "640x480", "--no-advice")
    found = answer(capsys, *asked, "--seq-len", 64, "--tokens-per-step", 256)
    assert any("640 by 480 pixels" in line and "is 16 tokens" in line for line in found["assumptions"])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 16, "width": 16}}))
    with pytest.raises(ConfigError, match="to hold the 16 of an image and a text"):
        outsize.predict(tmp_path, gpus="4090", image="640x480", seq_len=16, tokens_per_step=256)
    with pytest.raises(ConfigError, match="--frames: is of video models"):
        outsize.predict(tmp_path, gpus="4090", frames=2)


def test_of_a_hub_id_the_settings_of_its_processor_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Neither there nor at hand they are those of the family, which the answer says."""
    texts = {
        "config.json": zoo_of_lists.build("paligemma")[0].config.to_dict(),
        "processor_config.json": {"image_processor": {"size": {"height": 16, "width": 16}}},
    }

    def download(repo: str, name: str, *, local_files_only: bool) -> str:
        if name not in texts:
            raise LocalEntryNotFoundError(name)
        (tmp_path / name).write_text(json.dumps(texts[name]))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    asked = ("owner/tiny", "--gpus", "4090", "--image", "640x480", "--no-advice", "--seq-len", 64)
    by_its_own = answer(capsys, *asked)["assumptions"]
    del texts["processor_config.json"]
    as_usual = answer(capsys, *asked)["assumptions"]
    assert any("as its processor sizes it" in line for line in by_its_own)
    assert any("since no settings of its processor are there" in line for line in as_usual)
