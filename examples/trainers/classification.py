"""Sequences into classes with transformers' Trainer: ``python examples/trainers/classification.py path/to/model``."""

import outsize

import sys

from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

TEXTS = [f"{n} is {word}" for n in range(8) for word in ("even", "odd")]
LABELS = [int((n % 2 == 0) == (word == "even")) for n in range(8) for word in ("even", "odd")]

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], dtype="float32", num_labels=2)
model.config.pad_token_id = tokenizer.pad_token_id
model = outsize.wrap(model, device_memory="1GiB")
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "runs/classification",
        max_steps=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=[{**tokenizer(text), "labels": label} for text, label in zip(TEXTS, LABELS, strict=True)],
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(losses)
