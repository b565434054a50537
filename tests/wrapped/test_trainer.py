"""The Hugging Face `Trainer` and `accelerate`, unmodified, over a wrapped model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import Trainer, TrainingArguments

import outsize
import zoo
from wrapped.loops import assert_equal, wrapped

ROWS = [
    {name: value[0] for name, value in zoo.batch("llama", seed=seed, num_sequences=1).items()}
    for seed in range(12)
]
HOMES = ["host", "disk"]


def arguments(directory: Path, **changes: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(directory),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "max_grad_norm": 0.5,
            "save_steps": 2,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "data_seed": 1,
            "optim": "adamw_torch_fused",
            **changes,
        }
    )


def fit(
    model: nn.Module, directory: Path, *, resume: bool = False, optimizer: Any = None, **changes: Any
) -> Trainer:
    trainer = Trainer(
        model=model,
        args=arguments(directory, **changes),
        train_dataset=ROWS[:8],
        eval_dataset=ROWS[8:],
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in dict(model.state_dict()).items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("home", HOMES)
def test_trainer_trains_evaluates_saves_and_resumes_as_with_the_plain_model(home: str, tmp_path: Path):
    """Its own optimizer, clipping, schedule and accumulation."""
    plain = zoo.build("llama")
    want = fit(plain, tmp_path / "plain")
    with wrapped(zoo.build("llama"), home=home) as model:
        got = fit(model, tmp_path / "streamed")
        assert losses(got) == losses(want)
        assert got.evaluate()["eval_loss"] == want.evaluate()["eval_loss"]
        assert_equal(values(model), plain.state_dict())
    saved = type(plain).from_pretrained(tmp_path / "streamed" / "checkpoint-4")
    assert_equal(saved.state_dict(), plain.state_dict())


@pytest.mark.filterwarnings("ignore")
def test_trainer_comes_to_the_same_in_microbatches(tmp_path: Path):
    """But for rounding, which SGD leaves as small as it is; AdamW divides a gradient that is nothing else by itself."""
    plain = zoo.build("llama")
    before = values(plain)
    fit(plain, tmp_path / "plain", optim="sgd")
    assert not any(torch.equal(value, before[name]) for name, value in plain.named_parameters())
    with wrapped(zoo.build("llama"), home="host", microbatches=2) as model:
        fit(model, tmp_path / "halves", optim="sgd")
        assert_equal(values(model), plain.state_dict(), 1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("home", "dtype", "lr"),
    [("disk", torch.float32, 1e-2), ("host", torch.bfloat16, 1e-3)],
)
def test_trainer_takes_our_optimizer_and_resumes_with_it(
    home: str, dtype: torch.dtype, lr: float, tmp_path: Path
):
    """Bit for bit, in bf16 too: its masters come back with the optimizer's state."""

    def run(steps: int, resume: bool) -> dict[str, torch.Tensor]:
        with wrapped(zoo.build("llama", dtype=dtype), home=home, microbatches=2) as model:
            optimizer = outsize.AdamW(model, lr=lr, weight_decay=0.1)
            fit(
                model,
                tmp_path / "run",
                resume=resume,
                optimizer=optimizer,
                max_steps=steps,
                lr_scheduler_type="constant",
            )
            return values(model)

    run(2, False)
    resumed = run(4, True)
    want = run(4, False)
    assert_equal(resumed, want)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [lambda m: torch.optim.AdamW(m.parameters(), fused=True), outsize.AdamW])
def test_accelerate_prepares_a_wrapped_model(make: Any):
    plain = zoo.build("llama")
    reference = torch.optim.AdamW(plain.parameters(), fused=True)
    accelerator = Accelerator(cpu=True)
    with wrapped(zoo.build("llama")) as streamed:
        model, optimizer = accelerator.prepare(streamed, make(streamed))
        for step in range(3):
            batch = zoo.batch("llama", seed=step)
            for one, opt, backward in (
                (plain, reference, lambda loss: loss.backward()),
                (model, optimizer, accelerator.backward),
            ):
                backward(one(**batch).loss)
                opt.step()
                opt.zero_grad()
        assert accelerator.unwrap_model(model) is streamed
        assert_equal(values(streamed), plain.state_dict())
