"""Code of a model runs where its device is the current one, as kernels that ask for no other are launched there."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import zoo
from devices import IS_MADE_UP
from outsize.training.run import train
from outsize.training.short_runs import verify
from support import make_run
from wrapped.loops import wrapped

pytestmark = [
    pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late"),
    pytest.mark.filterwarnings("ignore"),
]
RUNS: dict[str, dict[str, Any]] = {
    "keep": {},
    "offload": {"memory": {"activations": "offload", "slots": 2}},
    "two workers, the first on the second device": {
        "memory": {"device": "late:1,0"},
        "train": {"microbatches": 4},
    },
}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int, int]]:
    """Thread, device of the numbers, and the current one, of each pass through a norm on a device."""
    noted: set[tuple[str, int, int]] = set()
    real = LlamaRMSNorm.forward

    def forward(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.device.type == "late":
            index = hidden_states.device.index
            noted.add((threading.current_thread().name, index, torch.late.current_device()))
        return real(module, hidden_states)

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    return noted


@pytest.mark.parametrize("name", RUNS)
def test_code_of_a_model_runs_where_its_device_is_the_current_one(name: str, seen: Any, tmp_path: Path):
    sections = {key: dict(value) for key, value in RUNS[name].items()}
    memory = {"device": "late:1", "home": "host", **sections.pop("memory", {})}
    train(make_run(tmp_path, memory=memory, **sections))
    assert seen
    assert {each for each in seen if each[1] != each[2]} == set()


def test_a_reference_does(seen: Any, tmp_path: Path):
    verify(make_run(tmp_path, memory={"device": "late:1", "home": "host"}))
    assert {each for each in seen if each[1] != each[2]} == set()


def test_a_generation_does(seen: Any):
    ids = zoo.batch("llama", num_sequences=2, seq_len=7)["input_ids"]
    with wrapped(zoo.build("llama").eval().requires_grad_(False), device="late:1", home="host") as model:
        model.generate(ids, max_new_tokens=3)
        before = torch.late.current_device()
        model(ids)
    assert before == torch.late.current_device() == 0
    assert {each for each in seen if each[1] != each[2]} == set()
