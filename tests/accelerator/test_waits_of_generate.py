"""Generation with so little room that units take turns in slots: each load waits for the slot's last forward."""

from typing import Any

import pytest
import torch

import zoo
from devices import IS_MADE_UP
from outsize.hardware.machine_spec import CUBLAS_BYTES
from outsize.wrapped.module import runner_of
from wrapped.loops import wrapped

pytestmark = [
    pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late"),
    pytest.mark.filterwarnings("default"),
]
ROOM = 130_000  # bytes; all of the model's units take twice as many


@pytest.mark.parametrize("name", ["llama", "llama_tied"])
@pytest.mark.parametrize("home", ["host", "disk"])
def test_units_take_turns_in_slots(home: str, name: str):
    """A tied table comes up by itself, before any unit does, through the same buffers."""
    ids = zoo.batch(name, num_sequences=2, seq_len=7)["input_ids"]
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "eos_token_id": None}
    want = zoo.build(name).eval().to("late:0").generate(ids.to("late:0"), **asked)
    room: dict[str, Any] = {"device": "late:0", "device_memory": CUBLAS_BYTES + ROOM}
    with wrapped(zoo.build(name).eval().requires_grad_(False), home=home, **room) as model:
        assert torch.equal(model.generate(ids, **asked), want)
        statistics = runner_of(model).inference_statistics()
    assert statistics is not None
    assert statistics.num_streamed > 1
