"""`outsize plan` of models of diffusers: by pixels and frames, with the FLOPs that torch counts of a real batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import outsize
import zoo_of_lists
from cli.test_plan import run
from outsize.config import parse_config
from outsize.errors import ConfigError, ModelError
from outsize.session.job.known_models import CLASS, FAMILIES, SAMPLE, Sample, made_up_sample, sample_of
from outsize.session.job.model_setup import count_model

pytestmark = pytest.mark.filterwarnings("default")  # diffusers calls what it deprecates itself
FLUX = {
    CLASS: "FluxTransformer2DModel", "attention_head_dim": 128, "guidance_embeds": True, "in_channels": 64,
    "joint_attention_dim": 4096, "num_attention_heads": 24, "num_layers": 4, "num_single_layers": 8,
    "patch_size": 1, "pooled_projection_dim": 768,
}  # fmt: skip
WAN = {CLASS: "WanTransformer3DModel", "patch_size": [1, 2, 2]}


@pytest.mark.parametrize(
    ("config", "asked", "want"),
    [
        (FLUX, (None, None, None), Sample(4096, 512)),
        (FLUX, (None, "1024x512", None), Sample(2048, 512)),
        (FLUX, (4608, None, None), Sample(4096, 512)),
        (WAN, (None, "832x480", 81), Sample(32760, 512)),
        (WAN, (None, "1280x720", 81), Sample(75600, 512)),
        ({CLASS: "LTXVideoTransformer3DModel", "patch_size": 1}, (None, "768x512", 121), Sample(6144, 128)),
        ({CLASS: "ZImageTransformer2DModel", "all_patch_size": [2]}, (None, "1024", None), Sample(4096, 512)),
        ({CLASS: "SanaTransformer2DModel", "patch_size": 1}, (None, "1024", None), Sample(1024, 300)),
    ],
)
def test_tokens_of_a_sample_are_those_of_the_pipelines(
    config: dict[str, Any], asked: tuple[Any, ...], want: Sample
):
    assert sample_of(config, *asked) == want


@pytest.mark.parametrize(
    ("config", "asked", "words"),
    [
        (FLUX, (None, None, 9), "--frames: FluxTransformer2DModel makes images"),
        (FLUX, (512, None, None), "a text of 512 and no image"),
        (FLUX, (4608, "1024", None), "write one"),
        (FLUX, (None, "8x8", None), "at least 16 a side"),
        (FLUX, (None, "large", None), "is to be pixels"),
        ({CLASS: "UNet2DConditionModel"}, (None, None, None), "no plan of a UNet2DConditionModel"),
    ],
)
def test_what_is_no_sample_is_refused_by_name(config: dict[str, Any], asked: tuple[Any, ...], words: str):
    with pytest.raises((ConfigError, ModelError), match=words):
        sample_of(config, *asked)


IMAGES = ["flux", "flux2", "chroma", "sd3", "qwen_image", "pixart", "sana", "lumina2", "z_image"]


@pytest.mark.parametrize("name", [*IMAGES, "wan", "ltx", "hunyuan_video", "cogvideox"])
def test_flops_are_those_that_torch_counts_of_a_real_sample(name: str):
    model = zoo_of_lists.build(name)[0]
    fields = {**model.config, CLASS: type(model).__name__}
    sample = {"lumina2": Sample(576, 32), "z_image": Sample(2304, 128)}.get(name, Sample(288, 96))
    settings = {
        "model": {"path": "unused", "dtype": "fp32"},
        "data": {"path": "unused", "seq_len": sample.tokens},
        "train": {"tokens_per_step": sample.tokens},
    }
    counts = count_model({**fields, SAMPLE: list(sample)}, parse_config(settings))
    assert counts.lengths[-1] <= sample.tokens  # what is tried is shorter, but where padding is to fit
    counter = FlopCounterMode(model, display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:  # it knows no flash attention of a CPU
        model(**made_up_sample(model, fields, sample))
    by_module = {name.partition(".")[2]: sum(kinds.values()) for name, kinds in counter.flop_counts.items()}
    work = counts.workload(1, sample.tokens)
    for unit, flops in zip(counts.spec.units, work.forward_flops, strict=False):
        assert flops == pytest.approx(by_module.get(unit.name, 0), rel=0.02, abs=64), unit.name
    assert sum(work.forward_flops) > 0
    twice = counts.workload(2, sample.tokens).forward_flops
    assert sum(twice) == pytest.approx(2 * sum(work.forward_flops), rel=0.02)


def test_a_model_is_planned_at_its_real_size(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(FLUX))
    options = {"gpus": "4090", "ram": "128GB", "method": "lora", "lora_modules": "to_q,to_k,to_v"}
    found = outsize.predict(tmp_path, **options, image="1024x1024", tokens_per_step=4 * 4608)
    assert 5e3 < found.tokens_per_s < 3e4  # 2,525 of all its layers
    smaller = outsize.predict(tmp_path, **options, image="512x512", tokens_per_step=4 * 1536)
    assert smaller.step_s < found.step_s
    with pytest.raises(ConfigError, match="name them, for example --lora-modules to_q"):
        outsize.predict(tmp_path, gpus="4090", method="lora")


def test_a_configuration_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(FLUX))
    assert run(tmp_path, "--gpus", "4090", "--output", tmp_path / "run.yaml") != 0
    assert "outsize train trains language models" in capsys.readouterr().err


def test_pixels_of_a_language_model_are_refused(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 64, **sizes}))
    with pytest.raises(ConfigError, match="a llama takes no images"):
        outsize.predict(tmp_path, gpus="4090", image="1024")


def test_every_family_is_of_a_class_that_diffusers_has():
    import diffusers

    assert all(hasattr(diffusers, name) for name in FAMILIES)
