"""A reward model with TRL: ``python examples/trainers/reward.py path/to/model``."""

import outsize

import sys

from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed
from trl import RewardConfig, RewardTrainer

ROWS = [
    {"prompt": f"the square of {n} is ", "chosen": f"{n * n}", "rejected": f"{n * n + 1} or so"}
    for n in range(8)
]

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], dtype="float32", num_labels=1)
model.config.pad_token_id = tokenizer.pad_token_id
model = outsize.wrap(model, device_memory="1GiB")
trainer = RewardTrainer(
    model=model,
    args=RewardConfig(
        "runs/reward",
        max_steps=3,
        per_device_train_batch_size=4,
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
