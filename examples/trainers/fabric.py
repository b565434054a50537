"""A loop of one's own with Fabric: ``python examples/trainers/fabric.py path/to/model``."""

import outsize

import sys

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

TEXTS = [f"the square of {n} is {n * n}" for n in range(16)]

seed_everything(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader([tokenizer(text) for text in TEXTS], 4, shuffle=True, collate_fn=collator)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32").train()
model = outsize.wrap(model, device_memory="1GiB")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
fabric = Fabric(accelerator="cpu")
module, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
losses = []
for batch in loader:
    loss = module(**batch).loss
    fabric.backward(loss)
    fabric.clip_gradients(module, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
