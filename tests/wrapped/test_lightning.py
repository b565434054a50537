"""Lightning's Trainer, unmodified, over a module that holds a wrapped model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import outsize
import zoo
from wrapped.loops import assert_equal, wrapped

ROWS = [zoo.batch("llama", seed=seed, num_sequences=1)["input_ids"][0] for seed in range(8)]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of Lightning are its own
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Holder(lightning.LightningModule):
    def __init__(self, model: nn.Module, make: Make) -> None:
        super().__init__()
        self.model, self.make, self.losses = model, make, list[float]()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.model)


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def own_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return outsize.AdamW(model, lr=1e-2)


def fit(
    model: nn.Module, make: Make, epochs: int, save: Path | None = None, resume: Path | None = None
) -> Any:
    holder = Holder(model, make)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(holder, DataLoader(ROWS, 2), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return holder.losses


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_fit_that_was_saved_and_resumed_has_the_losses_and_weights_of_the_plain_one(
    home: str, tmp_path: Path
):
    plain = zoo.build("llama")
    want, place = fit(plain, plain_adamw, 2), tmp_path / "half.ckpt"
    with wrapped(zoo.build("llama"), home=home) as model:
        got = fit(model, own_adamw, 1, save=place)
    with wrapped(zoo.build("llama"), home=home) as model:
        assert [*got, *fit(model, own_adamw, 2, resume=place)] == want
        assert_equal(dict(model.state_dict()), plain.state_dict())


def test_a_module_around_a_model_on_disk_has_its_weights_in_its_state():
    """With tied weights and with buffers, which stay where they are."""
    for family in ("llama_tied", "deepseek_v3"):
        plain = nn.Sequential(zoo.build(family))
        for number, parameter in enumerate(plain.parameters()):
            nn.init.constant_(parameter, number)
        with wrapped(zoo.build(family), home="disk") as model:
            around = nn.Sequential(model)
            assert not around.load_state_dict(plain.state_dict()).missing_keys
            assert_equal(around.state_dict(), plain.state_dict())
            with pytest.raises(RuntimeError, match=r"Missing key\(s\).*norm"):
                around.load_state_dict({n: v for n, v in plain.state_dict().items() if "norm" not in n})
