"""Losses, gradients and weights on an accelerator are those of plain PyTorch on it, with deterministic kernels.

Unlike `outsize verify`, which compares ends, this compares every gradient of every step.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import zoo
from devices import DEVICE, TORCH_DEVICE, needs_accelerator
from support import (
    make_batches,
    make_config,
    reseed_of,
    run_streamed,
    save_model,
    train_resident,
    unit_names,
)
from test_exactness import differences

pytestmark = [
    pytest.mark.cuda,
    needs_accelerator,
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs to be deterministic
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("home", ["host", "disk"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "phi3", "gpt_neox", "olmo2"])
def test_an_accelerator_is_exact(
    name: str, count: int, dtype: str, home: str, deterministic: None, tmp_path: Path
):
    """The model computes on the device and AdamW steps in host memory, here and in the reference."""
    model, batches = zoo.build(name), make_batches(name)
    save_model(model, tmp_path / "model")
    config = make_config(
        tmp_path / "model",
        batches,
        model={"dtype": dtype},
        train={"microbatches": count},
        memory={"device": DEVICE, "home": home, "slots": 2, "offload": True},
    )
    got, prepared = run_streamed(config, batches, tmp_path / "run")
    told = {"units": unit_names(prepared.split), "reseed": reseed_of(config.train.seed)}
    assert differences(got, train_resident(model, batches, config, TORCH_DEVICE, **told)) == []
