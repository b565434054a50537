"""Several workers on GPUs: the bits of a resident run on one of them.

On a machine with one GPU two workers share it, which tests streams, marks and hand-over, and not what crosses from one
device to another. ``OUTSIZE_TEST_DEVICES=cuda:0,1`` names others; ``emulated:2`` tries the tests without a GPU.
"""

from pathlib import Path
from typing import Any

import pytest

from devices import DEVICES, ON_ACCELERATOR, needs_accelerator
from outsize.accelerators import Devices
from outsize.runtime.device.device_group import can_copy
from outsize.training.short_runs import verify
from support import make_model_dir, make_run

pytestmark = [
    pytest.mark.cuda,
    needs_accelerator,
    pytest.mark.filterwarnings("default"),
]


def assert_equal_run(directory: Path, name: str = "llama", **sections: dict[str, Any]) -> None:
    """By way of host memory, unless ``sections`` say otherwise: two workers on one GPU could always copy in its own."""
    memory = {"device": DEVICES, "home": "host", **sections.pop("memory", {})}
    sections = {"parallel": {"handover": "host"}, **sections}
    result = verify(make_run(directory, name, memory=memory, **sections))
    assert result.loss_streamed == result.loss_resident
    assert result.differing == []
    assert result.equal


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_workers_are_resident_bit_for_bit(dtype: str, microbatches: int, tmp_path: Path):
    assert_equal_run(tmp_path, model={"dtype": dtype}, train={"microbatches": microbatches})


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt2", "gemma2", "bloom"])
def test_other_families(name: str, tmp_path: Path):
    make_model_dir(tmp_path / "model", name, tie_word_embeddings=False)
    assert_equal_run(tmp_path, name, model={"dtype": "bf16"}, train={"microbatches": 4})


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5])
def test_tied_weights_are_summed_use_by_use(max_grad_norm: float, tmp_path: Path):
    optimizer = {"max_grad_norm": max_grad_norm}
    assert_equal_run(tmp_path, "llama_tied", train={"microbatches": 4}, optimizer=optimizer)


def test_a_frozen_prefix(tmp_path: Path):
    model = {"dtype": "bf16", "freeze": ["*embed_tokens*", "*layers.0.*"]}
    assert_equal_run(tmp_path, model=model, train={"microbatches": 4})


@pytest.mark.parametrize(
    ("name", "dtype", "memory"),
    [
        ("llama", "fp32", {}),
        ("llama", "bf16", {"activations": "offload-products"}),
        ("qwen3_moe", "bf16", {}),
        ("llama_tied", "bf16", {}),
    ],
)
def test_copies_from_device_to_device_change_no_bit(
    name: str, dtype: str, memory: dict[str, Any], tmp_path: Path
):
    """On one GPU its own memory; between two of them their way, if they have one."""
    one, other = Devices.parse(DEVICES).each[:2]
    if ON_ACCELERATOR and not (can_copy(one, other) and can_copy(other, one)):
        pytest.skip(f"{one} and {other} do not copy to each other by themselves")
    sections = {"model": {"dtype": dtype}, "train": {"microbatches": 4}, "parallel": {"handover": "peer"}}
    peer = {} if ON_ACCELERATOR else {"peer_gb_per_s": 1.0}
    assert_equal_run(tmp_path, name, memory={**memory, **peer}, **sections)
