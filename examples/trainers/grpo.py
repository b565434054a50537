"""Reinforcement learning with TRL (GRPO): ``python examples/trainers/grpo.py path/to/model``.

The trainer writes its completions with the streamed model, too.
"""

import outsize

import sys

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"the square of {n} is "} for n in range(8)]


def lengths(completions: list[str], **_: object) -> list[float]:
    return [float(len(text)) for text in completions]


set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
model = outsize.wrap(model, device_memory="1GiB")
trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig(
        "runs/grpo",
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=4,
        beta=0.1,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    ),
    reward_funcs=lengths,
    train_dataset=Dataset.from_list(ROWS),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear"),
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(losses)
