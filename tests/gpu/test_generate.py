"""Generation with weights that come up to a GPU: the tokens of the model that lies there as a whole."""

from typing import Any

import pytest
import torch

import zoo
from devices import DEVICE, needs_accelerator
from outsize.hardware.machine_spec import CUBLAS_BYTES
from outsize.wrapped.module import runner_of
from wrapped.loops import wrapped

pytestmark = [
    pytest.mark.cuda,
    needs_accelerator,
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_greedy_tokens_are_those_of_the_resident_model(name: str, home: str):
    ids = zoo.batch("llama", num_sequences=2, seq_len=7)["input_ids"]
    asked: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "use_cache": True, "eos_token_id": None}
    want = zoo.build(name).eval().to(DEVICE).generate(ids.to(DEVICE), **asked)
    room: dict[str, Any] = {"device": DEVICE, "device_memory": CUBLAS_BYTES + 400_000}
    with wrapped(zoo.build(name).eval().requires_grad_(False), home=home, **room) as model:
        assert model.device == torch.device(DEVICE)
        for _ in range(2):
            assert torch.equal(model.generate(ids, **asked), want)
        assert runner_of(model).inference_statistics() is not None
