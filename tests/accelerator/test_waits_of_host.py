"""No lane waits for the device with a core kept busy, and what a step asks of the driver is counted."""

from pathlib import Path
from typing import Any

import pytest

from accelerator import late
from devices import IS_MADE_UP
from outsize.planner.program.program import lane_named
from outsize.planner.program.table import ROWS
from outsize.training.run import train
from support import make_run

pytestmark = [
    pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late"),
    pytest.mark.filterwarnings("ignore"),
]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute, global norm": {"memory": {"activations": "recompute"}, "optimizer": {"max_grad_norm": 0.05}},
    "offload": {"memory": {"activations": "offload", "slots": 2}},
    "offload of inputs, encoded": {"memory": {"offload": True}, "model": {"dtype": "bf16"}},
    "clip by unit": {"optimizer": {"clip": "unit", "max_grad_norm": 0.05}},
    "no clip": {"optimizer": {"clip": "none"}},
    "bf16 gradients": {"model": {"dtype": "bf16"}, "optimizer": {"gradients": "bf16"}},
    "int8 gradients": {"transport": {"gradients": "int8"}},
    "lossless weights": {"model": {"dtype": "bf16"}, "transport": {"weights": "lossless4"}},
    "nf4": {"model": {"dtype": "bf16"}, "train": {"method": "lora"}, "lora": {**LORA, "base_codec": "nf4"}},
    "on disk": {"memory": {"home": "disk"}},
    "two workers": {"memory": {"device": "late:0,1"}, "train": {"microbatches": 4}},
    "two workers on one, through the host": {
        "memory": {"device": "late:0,0"},
        "train": {"microbatches": 4},
        "parallel": {"handover": "host"},
    },
    "residents": {"model": {"dtype": "bf16"}, "memory": {"resident": 2}},
    "fp16": {"model": {"dtype": "fp16"}},
    "Muon on the device": {"optimizer": {"name": "muon", "ns_on": "device"}},
    "accumulation in rounds": {"train": {"microbatches": 4}, "memory": {"slots": 2}},
}

LANES = {row.lane for row in ROWS}


def config_of(name: str, directory: Path) -> Any:
    sections = {key: dict(value) for key, value in RUNS[name].items()}
    memory = {"device": "late:0", "home": "host", **sections.pop("memory", {})}
    return make_run(directory, memory=memory, **sections)


@pytest.mark.parametrize("name", RUNS)
def test_lanes_wait_asleep(name: str, tmp_path: Path):
    with late.waits_of_host() as waits:
        train(config_of(name, tmp_path))
    assert any(thread == "MainThread" for thread, *_ in waits)
    assert {wait for wait in waits if lane_named(wait[0]).kind in LANES} == set()
