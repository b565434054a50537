"""The scripts of `examples/trainers`: the lines that name outsize are all that streaming takes, and change no loss."""

import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import outsize
import zoo_of_lists
from examples.test_images import make_processor
from outsize.wrapped.module import is_wrapped
from support import make_model_dir, save_model

pytestmark = pytest.mark.filterwarnings("default")  # those of TRL are its own

PLACE = Path(__file__).parents[2] / "examples" / "trainers"
SCRIPTS = sorted(path.stem for path in PLACE.glob("*.py"))
ENCODERS = ("masked", "embeddings")


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would outlive the test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


def model_for(name: str, directory: Path) -> Path:
    if name == "sft_images":
        make_processor("llava_next").save_pretrained(directory)
        return save_model(zoo_of_lists.build("llava_next")[0], directory)
    place = make_model_dir(directory, "bert" if name in ENCODERS else "llama")
    tokenizer = AutoTokenizer.from_pretrained(place)
    if name in ENCODERS:
        tokenizer.add_special_tokens({"mask_token": "<mask>", "pad_token": "<pad>"})
    tokenizer.save_pretrained(place)
    return place


def run(lines: list[str], name: str) -> list[float]:
    """Run a script; returns its losses, and its norms of gradients where a trainer wrote them down."""
    made: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n".join(lines), f"{name}.py", "exec"), made)
    streamed = [made[one] for one in ("model", "reference") if is_wrapped(made.get(one))]
    assert len(streamed) == sum("outsize.wrap" in line for line in lines)
    for model in streamed:
        outsize.unwrap(model)
    log = made["trainer"].state.log_history if "trainer" in made else []
    return [*made["losses"], *(entry["grad_norm"] for entry in log if "grad_norm" in entry)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_with_the_losses_of_the_plain_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, str(model_for(name, tmp_path / "model"))])
    lines = (PLACE / f"{name}.py").read_text(encoding="utf-8").splitlines()
    plain = [line for line in lines if "outsize" not in line]
    assert len(lines) - len(plain) == 2 + (name == "dpo")  # the import, and a line for each model
    want = run(plain, name)
    assert len(want) >= 3
    assert run(lines, name) == want
