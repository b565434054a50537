"""The script of `examples/diffusion` has the losses of the plain one, goes on, and diffusers loads its adapters."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel

import outsize
import zoo_of_lists
from wrapped.loops import assert_equal

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
