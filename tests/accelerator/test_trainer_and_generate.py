"""Loops of transformers over a wrapped model, on a device that is late: `Trainer` with its data workers, `generate`."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from transformers import Trainer

import outsize
import zoo
from accelerator import late
from accelerator.exactness_set import DEVICE, host_adamw, two_layers, weights_of
from devices import IS_MADE_UP
from outsize.hardware.machine_spec import CUBLAS_BYTES
from outsize.wrapped.module import runner_of
from wrapped.loops import assert_equal, wrapped
from wrapped.test_trainer import ROWS, arguments, losses

pytestmark = [
    pytest.mark.skipif(not IS_MADE_UP, reason="run with --accelerator=late"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture
def accelerate_knows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate and transformers have lists of their own of the devices there are."""
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", DEVICE)
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> Trainer:
    """Batches come from two processes, are pinned by a thread, and are copied while the model is called."""
    settings: dict[str, Any] = {
        "use_cpu": False,
        "dataloader_pin_memory": True,
        "dataloader_num_workers": 2,
        "accelerator_config": {"non_blocking": True},
        "save_strategy": "no",
        "max_steps": 3,
    }
    args = arguments(directory, **settings)
    vars(args)["_setup_devices"] = torch.device(DEVICE)
    trainer = Trainer(model=model, args=args, train_dataset=ROWS, optimizers=(optimizer, None))
    assert trainer.accelerator.device == torch.device(DEVICE)
    trainer.train()
    return trainer


@pytest.mark.parametrize("home", ["host", "disk"])
def test_trainer_with_pinned_memory_and_workers_trains_as_the_resident_model(
    home: str, accelerate_knows: None, tmp_path: Path
):
    check_trainer(tmp_path, home)


@pytest.mark.slow
def test_trainer_does_so_over_and_over(accelerate_knows: None, tmp_path: Path):
    """50 times, each time late otherwise."""
    profiles = ("late-copies", "late-kernels")
    check_trainer(tmp_path, "host", [(profiles[seed % 2], seed) for seed in range(50)])


def check_trainer(directory: Path, home: str, lateness: Sequence[tuple[str, int] | None] = (None,)) -> None:
    plain = two_layers().to(DEVICE)
    want = losses(fit(plain, host_adamw(plain, lr=1e-2), directory / "plain"))
    assert len(want) == 3
    for profile in lateness:
        if profile is not None:
            late.set_profile(*profile)
        with wrapped(two_layers(), device=DEVICE, home=home) as model:
            optimizer = outsize.AdamW(model, lr=1e-2)
            assert losses(fit(model, optimizer, directory / "streamed")) == want
            optimizer.settle()
            assert_equal(weights_of(model), weights_of(plain))


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_mixture_generates_what_it_does_as_a_whole(home: str):
    """So little room that experts come and go."""
    ids = zoo.batch("llama", num_sequences=2, seq_len=7)["input_ids"]
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "use_cache": True, "eos_token_id": None}
    want = zoo.build("qwen3_moe").eval().to(DEVICE).generate(ids.to(DEVICE), **asked)
    room: dict[str, Any] = {"device": DEVICE, "device_memory": CUBLAS_BYTES + 165_000}
    with wrapped(zoo.build("qwen3_moe").eval().requires_grad_(False), home=home, **room) as model:
        for _ in range(2):
            assert torch.equal(model.generate(ids, **asked), want)
        statistics = runner_of(model).inference_statistics()
        assert statistics is not None
        assert statistics.num_streamed
