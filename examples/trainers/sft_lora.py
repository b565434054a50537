"""Supervised fine-tuning of adapters with TRL and PEFT: ``python examples/trainers/sft_lora.py path/to/model``."""

import outsize

import sys

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

ROWS = [{"prompt": f"the square of {n} is ", "completion": str(n * n)} for n in range(8)]

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32")
adapters = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
model = get_peft_model(model, adapters)
model = outsize.wrap(model, device_memory="1GiB")
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        "runs/sft_lora",
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
