"""Generation with weights that come up to a GPU: the tokens of the model that lies there as a whole."""

from typing import Any

import pytest
import torch

import zoo
from devices import DEVICE, ON_ACCELERATOR, TORCH_DEVICE, needs_accelerator
from outsize.hardware.machine_spec import CUBLAS_BYTES
from outsize.model.split import split
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
    want = zoo.build(name).eval().to(TORCH_DEVICE).generate(ids.to(TORCH_DEVICE), **asked)
    room: dict[str, Any] = {"device": DEVICE, "device_memory": CUBLAS_BYTES + 400_000}
    with wrapped(zoo.build(name).eval().requires_grad_(False), home=home, **room) as model:
        assert model.device == torch.device(TORCH_DEVICE)
        for _ in range(2):
            assert torch.equal(model.generate(ids, **asked), want)
        assert runner_of(model).inference_statistics() is not None


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=str)
def test_a_cache_that_leaves_no_room_rests_on_the_host(settings: dict[str, Any]):
    """Each layer comes up for its unit from pinned memory, and its news go down into it."""
    ids = zoo.batch("llama", num_sequences=2, seq_len=7)["input_ids"]
    common = {"do_sample": False, "use_cache": True, "eos_token_id": None}
    asked: dict[str, Any] = {"max_new_tokens": 24, **common, **settings}
    want = zoo.build("llama").eval().to(TORCH_DEVICE).generate(ids.to(TORCH_DEVICE), **asked)
    found = []
    for budget in (2**20, None):
        room = ON_ACCELERATOR * CUBLAS_BYTES + (budget or _room_of_a_unit(found[0]))
        with wrapped(
            zoo.build("llama").eval().requires_grad_(False), device=DEVICE, device_memory=room
        ) as model:
            assert torch.equal(model.generate(ids, **asked), want)
            found.append(runner_of(model).inference_statistics())
    assert found[0].cache_bytes_moved == 0
    assert found[1].cache_bytes_moved > 0


def _room_of_a_unit(roomy: Any) -> int:
    """Return bytes that hold the outer weights, the largest unit, a forward, and not quite the cache."""
    units = split(zoo.build("llama")).spec.units
    rest = sum(unit.weight_bytes("fp32") for unit in units if unit.kind == "rest")
    largest = max(unit.weight_bytes("fp32") for unit in units if unit.kind == "block")
    return rest + largest + int(roomy.workspace_bytes) + int(0.85 * roomy.cache_bytes) + 512
