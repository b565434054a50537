"""A few seconds of equality on the made-up accelerator, for as many seeds as there is time: `bench/bench_seeds.py`.

Between them the cases touch every kind of transfer: weights and gradients of a home in host memory and on disk,
plain and encoded; activations that leave and come back; two devices that hand over; inputs that are on their way while
a model is called. What they are compared with lies on the device as a whole, and is trained once, with nothing late.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import outsize
import zoo
from accelerator import late
from outsize import files
from outsize.config import Config
from reference import Trace
from support import make_batches, make_config, run_streamed, save_model, train_resident
from test_exactness import differences
from wrapped.loops import gradients, wrapped

DEVICE, DEVICES = "late:0", "late:0,1"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and the same run of a model that lies on the device."""

    streamed: Callable[[Path], Trace]
    resident: Callable[[Path], Trace]


def two_layers() -> nn.Module:
    config = zoo.make_config("llama")
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).train()


def run_case(**sections: Any) -> Case:
    """Two steps of two microbatches."""
    batches = make_batches("llama", num_steps=2)

    def config_in(directory: Path) -> Config:
        save_model(two_layers(), directory / "model")
        return make_config(directory / "model", batches, train={"microbatches": 2}, **sections)

    return Case(
        streamed=lambda directory: run_streamed(config_in(directory), batches, directory / "run")[0],
        resident=lambda directory: train_resident(two_layers(), batches, config_in(directory), DEVICE),
    )


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trace:
    """A loop of the user's own: batches are pinned, and sent with ``non_blocking=True``."""
    trace = Trace()
    for step in range(2):
        host = zoo.batch("llama", num_sequences=4, seed=step)
        batch = {name: value.pin_memory().to(DEVICE, non_blocking=True) for name, value in host.items()}
        loss = model(**batch).loss
        loss.backward()
        trace.losses.append(float(loss))
        trace.gradients.append({name: gradient.cpu() for name, gradient in gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return trace


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu().clone() for name, value in dict(model.state_dict()).items()}


def loop_streamed(_: Path) -> Trace:
    with wrapped(two_layers(), device=DEVICE, home="host") as model:
        optimizer = outsize.AdamW(model, lr=1e-3)
        trace = loop(model, optimizer)
        optimizer.settle()
        trace.weights = weights_of(model)
        return trace


def host_adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    """An optimizer that steps fp32 masters in host memory, as a streamed one does, of a model that lies on a device."""
    masters = {name: nn.Parameter(value.detach().cpu()) for name, value in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), fused=True, **settings)

    def fetch_gradients(*_: Any) -> None:
        for name, value in model.named_parameters():
            masters[name].grad = None if value.grad is None else value.grad.cpu()
            value.grad = None

    def put_back(*_: Any) -> None:
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(masters[name])

    optimizer.register_step_pre_hook(fetch_gradients)
    optimizer.register_step_post_hook(put_back)
    return optimizer


def loop_resident(_: Path) -> Trace:
    model = two_layers().to(DEVICE)
    trace = loop(model, host_adamw(model, lr=1e-3))
    trace.weights = weights_of(model)
    return trace


CASES = {
    "on disk, offloaded": run_case(
        model={"dtype": "bf16"},
        memory={"device": DEVICE, "home": "disk", "slots": 2, "activations": "offload", "offload": True},
    ),
    "two devices, encoded": run_case(
        model={"dtype": "bf16"}, memory={"device": DEVICES}, transport={"weights": "lossless4"}
    ),
    "a loop over a wrapped model": Case(streamed=loop_streamed, resident=loop_resident),
}


@cache
def wanted(name: str) -> Trace:
    late.set_profile("prompt")
    with tempfile.TemporaryDirectory() as directory:
        return CASES[name].resident(Path(directory))


def differences_of(name: str, profile: str, seed: int, directory: Path) -> list[str]:
    """Say where a case differs from its resident run while the device is late as ``profile`` and ``seed`` say."""
    want = wanted(name)
    late.set_profile(profile, seed)
    with files.replaced(late.WatchedFiles()):
        trace = CASES[name].streamed(directory)
    return [*differences(trace, want), *late.offences()]
