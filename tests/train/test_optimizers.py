"""Runs of SGD and Lion: streamed equals resident, resumed equals whole, and none goes on with another's state."""

from pathlib import Path
from typing import Any

import pytest
import torch

from optim.test_other_rules import PlainLion as Published
from outsize.errors import ConfigError
from outsize.training.resident import PlainLion
from outsize.training.run import plan, train
from outsize.training.verify import verify
from support import assert_same_end, in_dir, make_run
from train.test_states import BF16, DISK, EMULATED, RING, interrupted

SGD: dict[str, Any] = {"name": "sgd", "lr": 0.1}
LION: dict[str, Any] = {"name": "lion", "lr": 1e-3}
# What is trained, by what, and where; each is exact.
EXACT: dict[str, dict[str, Any]] = {
    "sgd, bf16": {"model": BF16, "optimizer": {**SGD, "dampening": 0.2}},
    "sgd, bf16, separate masters": {"model": BF16, "optimizer": {**SGD, "masters": "separate"}},
    "sgd, nesterov, by unit": {"model": BF16, "optimizer": {**SGD, **RING, "nesterov": True}},
    "sgd without momentum, on disk": {"model": BF16, "optimizer": {**SGD, "momentum": 0.0}, "memory": DISK},
    "sgd over two workers": {"optimizer": SGD, "memory": {"device": "emulated:2"}},
    "lion": {"optimizer": LION},
    "lion, bf16": {"model": BF16, "optimizer": LION, "memory": EMULATED},
    "lion, bf16, separate masters on disk": {
        "model": BF16,
        "optimizer": {**LION, "masters": "separate"},
        "memory": DISK,
    },
    "lion, by unit, on disk": {"model": BF16, "optimizer": {**LION, **RING}, "memory": DISK},
    "lion, fp16": {"model": {"dtype": "fp16"}, "optimizer": LION},
}


@pytest.mark.parametrize("case", EXACT)
def test_streamed_is_resident_bit_for_bit(case: str, tmp_path: Path) -> None:
    """As torch's SGD steps, and as a plain Lion does."""
    result = verify(make_run(tmp_path, **EXACT[case]))
    assert (result.equal, result.differing) == (True, [])
    assert result.loss_streamed[-1] < result.loss_streamed[0]


def test_the_plain_lion_of_the_resident_run_is_the_published_one() -> None:
    one, other = (torch.nn.Parameter(torch.linspace(-1.0, 1.0, 99)) for _ in range(2))
    ours = PlainLion([{"params": [one], "weight_decay": 0.1}], lr=1e-2, betas=(0.9, 0.99))
    published = Published([{"params": [other], "weight_decay": 0.1}], (0.9, 0.99))
    published.param_groups[0]["lr"] = 1e-2
    for step in range(5):
        one.grad = torch.sin(torch.arange(99.0) * (step + 1))
        other.grad = one.grad.clone()
        ours.step()
        published.step()
    assert torch.equal(one, other)


@pytest.mark.parametrize(("optimizer", "memory"), [({**LION, "state": "int8"}, DISK), (SGD, DISK), (SGD, {})])
def test_a_run_that_goes_on_ends_as_a_whole_one(
    optimizer: dict[str, Any], memory: dict[str, Any], tmp_path: Path
) -> None:
    """From a commit, and from a checkpoint."""
    config = make_run(tmp_path, model=BF16, optimizer=optimizer, memory=memory)
    train(in_dir(config, tmp_path / "whole"))
    if memory:
        interrupted(in_dir(config, tmp_path / "parts"), 2)
    else:
        train(in_dir(config, tmp_path / "parts", steps=2))
    train(in_dir(config, tmp_path / "parts", resume="auto"))
    assert_same_end(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("former", "given", "key", "memory"),
    [
        ({}, SGD, "optimizer.name=adamw, not sgd", {}),
        (LION, {}, "optimizer.name=lion, not adamw", DISK),
        (SGD, LION, "optimizer.name=sgd, not lion", DISK),
        (SGD, {**SGD, "momentum": 0.0}, "optimizer.momentum=above 0, not 0", {}),
    ],
)
def test_no_optimizer_goes_on_with_the_state_of_another(
    former: dict[str, Any], given: dict[str, Any], key: str, memory: dict[str, Any], tmp_path: Path
) -> None:
    first = make_run(tmp_path, optimizer=former, memory=memory)
    if memory:
        interrupted(in_dir(first, tmp_path / "run"), 2)
    else:
        train(in_dir(first, tmp_path / "run", steps=1))
    second = make_run(tmp_path, optimizer=given, memory=memory)
    with pytest.raises(ConfigError, match=f"belongs to a run with {key}"):
        train(in_dir(second, tmp_path / "run", resume="auto"))


def test_a_momentum_takes_half_of_two_moments_and_no_momentum_nothing(tmp_path: Path) -> None:
    def state_bytes(**optimizer: Any) -> int:
        return plan(make_run(tmp_path, model=BF16, optimizer=optimizer)).home_parts.get("optimizer state", 0)

    adamw = state_bytes()
    assert state_bytes(**LION) == state_bytes(**SGD) == adamw / 2 > 0
    assert state_bytes(**SGD, momentum=0.0) == 0
    assert state_bytes(**SGD, momentum=0.0, state="int8") == 0
