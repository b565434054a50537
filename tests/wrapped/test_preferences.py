"""TRL's preference trainers on a wrapped model: the losses of the same script over the plain one."""

import copy
from collections.abc import Callable
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
MARKED = [
    {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}
    for number, pair in enumerate(PAIRS)
    for good in [number % 2 == 0]
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


def scored() -> nn.Module:
    config = copy.deepcopy(zoo.make_config("llama"))
    config.vocab_size, config.num_labels, config.pad_token_id = 264, 1, 0
    torch.manual_seed(0)
    made: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
    return made


def fit(
    trainer: Any, config: Any, model: nn.Module, rows: list[dict[str, Any]], path: Path, **more: Any
) -> list[float]:
    """The script; returns its losses and norms of gradients."""
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    own = {
        name: more.pop(name)
        for name in list(more)
        if name in ("max_completion_length", "num_generations", "beta")
    }
    torch.manual_seed(5)
    made = trainer(
        model=model,
        args=config(output_dir=str(path), **SETTINGS, **own),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        **more,
    )
    made.train()
    log = made.state.log_history
    return [entry[key] for entry in log for key in ("loss", "grad_norm") if key in entry]


def lengths(completions: list[str], **others: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def orpo(model: nn.Module, path: Path) -> list[float]:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return fit(ORPOTrainer, ORPOConfig, model, PAIRS, path)


def grpo(model: nn.Module, path: Path) -> list[float]:
    rows = [{"prompt": pair["prompt"]} for pair in PAIRS]
    more = {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}
    return fit(trl.GRPOTrainer, trl.GRPOConfig, model, rows, path, reward_funcs=lengths, **more)


def dpo(model: nn.Module, path: Path, **more: Any) -> list[float]:
    return fit(trl.DPOTrainer, trl.DPOConfig, model, PAIRS, path, **more)


def dpo_with_a_new_adapter(model: nn.Module, path: Path) -> list[float]:
    return dpo(
        model, path, peft_config=peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules="all-linear")
    )


SCRIPTS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Path], list[float]]]] = {
    "dpo, an adapter": (adapted, dpo),
    "dpo, an adapter of the trainer's": (causal, dpo_with_a_new_adapter),
    "orpo": (adapted, orpo),
    "kto": (adapted, lambda model, path: fit(trl.KTOTrainer, trl.KTOConfig, model, MARKED, path)),
    "reward": (scored, lambda model, path: fit(trl.RewardTrainer, trl.RewardConfig, model, PAIRS, path)),
    "grpo": (adapted, grpo),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_with_the_losses_of_the_plain_model(name: str, tmp_path: Path):
    make, script = SCRIPTS[name]
    want = script(make(), tmp_path / "plain")
    assert len(want) >= 2
    with wrapped(make(), home="host") as model:
        assert script(model, tmp_path / "wrapped") == want


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
