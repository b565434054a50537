"""A training loop of one's own over a streamed model: the loop does not know.

    python examples/own_loop.py                      # a small Llama with fresh weights, home on disk
    python examples/own_loop.py path/to/model        # a model of yours, in Hugging Face layout

Trains on random tokens, so watch the loss fall towards remembering them.
"""

import outsize

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

STEPS = 20


def main() -> None:
    """Train, save, and load what was saved."""
    torch.manual_seed(0)
    settings = {"device": "cpu", "device_memory": "256MiB", "home": "disk", "microbatches": 2}
    if len(sys.argv) > 1:
        model = outsize.load(Path(sys.argv[1]), **settings)
    else:
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            pad_token_id=0,
        )
        model = outsize.wrap(LlamaForCausalLM(config), **settings)
    ids = torch.randint(1, model.config.vocab_size, (8, 64))
    optimizer = outsize.AdamW(model, lr=3e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    for step in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = outsize.clip_grad_norm_(model, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        saved = type(outsize.unwrap(model)).from_pretrained(directory)
        same = all(torch.equal(a, b) for a, b in zip(saved.parameters(), model.parameters(), strict=True))
        print(f"what was saved is what was trained: {same}")


if __name__ == "__main__":
    main()
