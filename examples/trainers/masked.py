"""Masked words of an encoder with transformers' Trainer: ``python examples/trainers/masked.py path/to/encoder``."""

import outsize

import sys

from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

TEXTS = [f"the square of {n} is {n * n}" for n in range(16)]

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1], dtype="float32")
model = outsize.wrap(model, device_memory="1GiB")
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "runs/masked",
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=[tokenizer(text) for text in TEXTS],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=1),
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(losses)
