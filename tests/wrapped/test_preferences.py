"""TRL's preference training on a wrapped model: the losses of the same script over the plain one."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import outsize
import zoo
from support import make_tokenizer
from wrapped.loops import wrapped

peft = pytest.importorskip("peft")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("default")  # those of TRL are its own

PAIRS = [
    {"prompt": f"the square of {n} is ", "chosen": f"{n * n}", "rejected": f"{n * n + 1} or so"}
    for n in range(8)
]
LORA = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "optim": "adamw_torch_fused",
    "gradient_checkpointing": False,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "save_strategy": "no",
}


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would outlive the test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


def causal() -> nn.Module:
    config = zoo.make_config("llama")
    config.vocab_size = 264
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return made


def adapted() -> nn.Module:
    return peft.get_peft_model(causal(), LORA)


def dpo(model: nn.Module, path: Path, **more: Any) -> list[float]:
    """The script; returns its losses and norms of gradients."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(5)
    made = trl.DPOTrainer(
        model=model,
        args=trl.DPOConfig(output_dir=str(path), **SETTINGS),
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=tokenizer,
        **more,
    )
    made.train()
    log = made.state.log_history
    return [entry[key] for entry in log for key in ("loss", "grad_norm") if key in entry]


def test_an_adapter_that_the_trainer_copies_is_streamed(tmp_path: Path):
    """As its reference; `examples/trainers` has what trainers add of their own."""
    want = dpo(adapted(), tmp_path / "plain")
    with wrapped(adapted(), home="host") as model:
        assert dpo(model, tmp_path / "wrapped") == want


@pytest.mark.parametrize("home", ["host", "disk"])
def test_dpo_of_all_weights_against_a_streamed_reference(home: str, tmp_path: Path):
    want = dpo(causal(), tmp_path / "plain", ref_model=causal())
    with (
        wrapped(causal(), home=home) as model,
        wrapped(causal().requires_grad_(False), home=home) as reference,
    ):
        own = (outsize.AdamW(model, lr=1e-2, weight_decay=0.0), None)
        got = dpo(model, tmp_path / "wrapped", ref_model=reference, optimizers=own)
    assert got[::2] == want[::2]
