"""`outsize train` has the weights of transformers' `Trainer` over the same batches: schedules, accumulation, decay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import outsize
from outsize.checkpoint.checkpoint_state import latest
from outsize.session import stream
from support import make_run

STEPS = 6
# Ours, and how Trainer says it; num_cycles counts the first descent, too.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cosine, warm-up of a fraction": (
        {"schedule": "cosine", "warmup_ratio": 0.2},
        {"lr_scheduler_type": "cosine", "warmup_steps": 0.2},
    ),
    "linear": (
        {"schedule": "linear", "warmup_steps": 2, "weight_decay": 0.3},
        {"lr_scheduler_type": "linear", "warmup_steps": 2, "weight_decay": 0.3},
    ),
    "restarts": (
        {"schedule": "cosine_restarts", "restarts": 1},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
    ),
    "SGD": (
        {"name": "SGD", "args": {"momentum": 0.9}, "weight_decay": 0.1},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
    ),
}


class InOrder(Trainer):
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def _by_trainer(config: Any, rows: list[dict[str, Tensor]], directory: Path, **settings: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32, use_cache=False)
    given = {
        "optim": "adamw_torch_fused", "weight_decay": 0.1, "lr_scheduler_type": "constant", **settings,
        "learning_rate": config.optimizer.lr, "max_grad_norm": 0.5, "max_steps": STEPS,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    arguments = TrainingArguments(
        str(directory), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, **given
    )
    InOrder(model=model, args=arguments, train_dataset=rows).train()  # type: ignore[arg-type]
    return model.state_dict()


@pytest.mark.parametrize("name", SCHEDULES)
def test_weights_are_those_of_the_trainer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = SCHEDULES[name]
    config = make_run(tmp_path, "gpt_neox", train={"steps": STEPS}, optimizer={"lr": 1e-2, **ours})
    batches: list[Any] = []
    cut = stream.microbatches_of

    def noted(batch: Any, *arguments: Any) -> Any:
        batches.append(batch.inputs)
        return cut(batch, *arguments)

    monkeypatch.setattr(stream, "microbatches_of", noted)
    outsize.train(config)
    columns = [[name for name, value in inputs.items() if isinstance(value, Tensor)] for inputs in batches]
    rows = [
        {name: inputs[name][at] for name in names}
        for names, inputs in zip(columns, batches, strict=True)
        for at in range(4)
    ]
    want = _by_trainer(config, rows, tmp_path / "trainer", **theirs)
    directory = latest(Path(str(config.train.run_dir)))
    assert directory is not None
    got = load_file(next(directory.glob("*.safetensors")))
    assert len(rows) == 4 * STEPS
    for key, value in got.items():
        assert torch.equal(value, want[key]), key
