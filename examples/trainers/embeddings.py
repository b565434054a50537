"""Embeddings of sentences from pairs that belong together: ``python examples/trainers/embeddings.py path/to/encoder``.

A loop of one's own: each sentence is to be nearer to its partner than to those of the others (InfoNCE).
"""

import outsize

import sys

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer, set_seed

PAIRS = [(f"the square of {n}", f"{n} times {n} is {n * n}") for n in range(8)]

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModel.from_pretrained(sys.argv[1], dtype="float32").train()
model = outsize.wrap(model, device_memory="1GiB")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def embed(inputs: dict[str, Tensor]) -> Tensor:
    hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


losses = []
for _ in range(3):
    sentences = [text for pair in PAIRS for text in pair]
    found = embed(dict(tokenizer(sentences, padding=True, return_tensors="pt")))
    loss = cross_entropy(found[0::2] @ found[1::2].T / 0.05, torch.arange(len(PAIRS)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print(losses)
