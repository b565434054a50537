"""Supervised fine-tuning on images with TRL: ``python examples/trainers/sft_images.py path/to/model``."""

import outsize

import sys

from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, set_seed
from trl import SFTConfig, SFTTrainer

SHADES = [Image.new("RGB", (24, 16), (shade, 128, 255 - shade)) for shade in range(0, 256, 32)]
ROWS = [
    {
        "images": SHADES[n : n + 1 + n % 2],
        "prompt": [{"role": "user", "content": "how red is this?"}],
        "completion": [{"role": "assistant", "content": str(32 * n)}],
    }
    for n in range(8)
]

set_seed(0)
processor = AutoProcessor.from_pretrained(sys.argv[1])
model = AutoModelForImageTextToText.from_pretrained(sys.argv[1], dtype="float32")
model = outsize.wrap(model, device_memory="1GiB")
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        "runs/sft_images",
        max_steps=3,
        max_length=None,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=Dataset.from_list(ROWS),
    processing_class=processor,
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(losses)
