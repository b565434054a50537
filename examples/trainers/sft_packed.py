"""Supervised fine-tuning on packed sequences with TRL: ``python examples/trainers/sft_packed.py path/to/model``."""

import outsize

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

ROWS = [{"text": f"the square of {n} is {n * n}"} for n in range(32)]

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
model = outsize.wrap(model, device_memory="1GiB")
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        "runs/sft_packed",
        max_steps=3,
        packing=True,
        max_length=32,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_list(ROWS),
    processing_class=tokenizer,
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(losses)
