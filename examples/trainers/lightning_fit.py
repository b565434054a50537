"""Lightning's Trainer, which steps by itself: ``python examples/trainers/lightning_fit.py path/to/model``."""

import outsize

import sys

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

TEXTS = [f"the square of {n} is {n * n}" for n in range(16)]
losses = []


class Squares(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        loss = self.model(**batch).loss
        losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)


lightning.seed_everything(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader([tokenizer(text) for text in TEXTS], 4, shuffle=True, collate_fn=collator)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32").train()
model = outsize.wrap(model, device_memory="1GiB")
fitting = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    enable_checkpointing=False,
    logger=False,
)
fitting.fit(Squares(model), loader)
print(losses)
