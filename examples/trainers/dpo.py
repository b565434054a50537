"""Preference tuning of all weights with TRL (DPO): ``python examples/trainers/dpo.py path/to/model``.

The reference model is streamed as well; leave its line out, and it is held in memory.
"""

import outsize

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import DPOConfig, DPOTrainer

ROWS = [
    {"prompt": f"the square of {n} is ", "chosen": f"{n * n}", "rejected": f"{n * n + 1} or so"}
    for n in range(8)
]

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
model = outsize.wrap(model, device_memory="1GiB")
reference = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32").requires_grad_(False)
reference = outsize.wrap(reference, device_memory="1GiB")
trainer = DPOTrainer(
    model=model,
    ref_model=reference,
    args=DPOConfig(
        "runs/dpo",
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
