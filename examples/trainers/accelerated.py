"""A loop of one's own with accelerate: ``python examples/trainers/accelerated.py path/to/model``."""

import outsize

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    get_linear_schedule_with_warmup,
    set_seed,
)

TEXTS = [f"the square of {n} is {n * n}" for n in range(16)]

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader([tokenizer(text) for text in TEXTS], 4, shuffle=True, collate_fn=collator)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="float32").train()
model = outsize.wrap(model, device_memory="1GiB")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
schedule = get_linear_schedule_with_warmup(optimizer, 1, len(loader))
accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
