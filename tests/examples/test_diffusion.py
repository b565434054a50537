"""The script of `examples/diffusion` has the losses of the plain one, goes on, and diffusers loads its adapters."""

import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)

import outsize
import zoo_of_lists
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, wrapped

pytestmark = pytest.mark.filterwarnings("default")  # those of diffusers are its own
SCRIPT = Path(__file__).parents[2] / "examples" / "diffusion" / "flux.py"
LINES = SCRIPT.read_text(encoding="utf-8").splitlines()
PLAIN = [line for line in LINES if not line.startswith(("import outsize", "outsize.wrap"))]


def run(lines: list[str], model: Path, out: Path, *options: str) -> dict[str, Any]:
    """Run the script; returns its names, its model unwrapped."""
    made: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [SCRIPT.name, str(model), "--out", str(out), *options])
        exec(compile("\n".join(lines), SCRIPT.name, "exec"), made)
    if lines is LINES:
        outsize.unwrap(made["model"])
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    zoo_of_lists.build("flux")[0].save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_it_is_short():
    assert len(LINES) < 80
    assert len(LINES) - len(PLAIN) == 2


@pytest.mark.parametrize("full", [False, True], ids=["adapters", "full"])
def test_losses_and_files_are_those_of_the_plain_script_also_when_it_goes_on(
    full: bool, model: Path, tmp_path: Path
):
    options = ["--full"] if full else []
    want = run(PLAIN, model, tmp_path / "plain", *options)
    run(LINES, model, tmp_path / "out", *options, "--steps", "2")
    got = run(LINES, model, tmp_path / "out", *options)
    assert len(want["losses"]) == 4
    assert got["losses"] == want["losses"]
    assert_equal(dict(got["model"].state_dict()), want["model"].state_dict())
    if full:
        saved = FluxTransformer2DModel.from_pretrained(tmp_path / "out" / "transformer")
        assert_equal(dict(saved.state_dict()), want["model"].state_dict())


def test_diffusers_loads_the_adapters(model: Path, tmp_path: Path):
    made = run(LINES, model, tmp_path / "out", "--base-codec", "nf4")
    fresh = FluxTransformer2DModel.from_pretrained(model)
    parts = ("scheduler", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipeline = FluxPipeline(transformer=fresh, **dict.fromkeys(parts))
    pipeline.load_lora_weights(tmp_path / "out")
    loaded = {name: value for name, value in fresh.state_dict().items() if "lora" in name}
    trained = {name: value for name, value in made["model"].state_dict().items() if "lora" in name}
    assert len(loaded) == len(trained) > 0
    for (name, value), (_, other) in zip(sorted(loaded.items()), sorted(trained.items()), strict=True):
        assert torch.equal(value, other), name


# A pipeline, its model, and what stands for its text encoders and their sizes.
TEXTS = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
PIPELINES: dict[str, tuple[str, tuple[str, ...], tuple[int, int], int]] = {
    "flux": ("FluxPipeline", TEXTS, (8, 32), 32),
    "sd3": ("StableDiffusion3Pipeline", (*TEXTS, "text_encoder_3", "tokenizer_3"), (6, 32), 32),
    "sdxl_unet": ("StableDiffusionXLPipeline", TEXTS, (6, 16), 16),
    "wan": ("WanPipeline", TEXTS[:2], (6, 16), 0),
}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_over_a_wrapped_model_makes_the_same_latents(name: str, frozen: bool):
    kind, absent, shape, pooled = PIPELINES[name]
    model = zoo_of_lists.build(name)[0].eval().requires_grad_(not frozen)
    part = "unet" if "unet" in name else "transformer"
    scheduler = FlowMatchEulerDiscreteScheduler() if part == "transformer" else EulerDiscreteScheduler()
    parts = {part: model, "scheduler": scheduler, "vae": None, **dict.fromkeys(absent)}
    pipeline = getattr(diffusers, kind)(**parts)
    pipeline.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "latent"}
    for number, prompt in enumerate(
        ("prompt_embeds", "negative_prompt_embeds")[: 1 if name == "flux" else 2]
    ):
        random = torch.Generator().manual_seed(number)
        given[prompt] = torch.randn(1, *shape, generator=random)
        if pooled:
            given[prompt.replace("prompt", "pooled_prompt")] = torch.randn(1, pooled, generator=random)

    def latents() -> torch.Tensor:
        made: torch.Tensor = pipeline(**given, generator=torch.Generator().manual_seed(2))[0]
        return made

    want = latents()
    with wrapped(model, home="host", device="emulated:1", slots=2):
        assert torch.equal(latents(), want)
        assert runner_of(model).split.streamed_share > 0.75
