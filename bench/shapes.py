"""Models that benchmarks train: shapes whose buffers matter, with fresh weights, and data for them.

Importing this imports nothing heavy. `write` makes a Hugging Face directory and runs best in a process of its own:
it holds the whole model, and the benchmark's own memory must not remember that.

    python bench/shapes.py llama-100m DIRECTORY
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

VOCABULARY = 8192
NUM_TOKENS = 400_000
MAX_LENGTH = 2048

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_LENGTH,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-10m": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "head_dim": 32,
    },
    "llama-34m": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
    },
    "llama-100m": {
        "model_type": "llama",
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "llama-tied": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "hidden_size": 384,
        "intermediate_size": 768,
        "moe_intermediate_size": 384,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
    },
    "gemma2": {
        "model_type": "gemma2",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "sliding_window": 256,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 512,
        "n_layer": 8,
        "n_head": 8,
        "n_positions": MAX_LENGTH,
        "n_inner": 2048,
    },
}


def hf_config(name: str) -> Any:
    """Return the config of a shape; keys that its class does not know are left out."""
    from transformers import AutoConfig

    wanted = COMMON | SHAPES[name]
    config_class = type(AutoConfig.for_model(wanted.pop("model_type")))
    known = set(config_class.__dataclass_fields__) | set(config_class.attribute_map)
    own = SHAPES[name]
    wanted = {
        k: v
        for k, v in wanted.items()
        if k in known and (k in own or k != "num_attention_heads" or "n_head" not in own)
    }
    return config_class(**wanted)


def write(name: str, directory: Path) -> int:
    """Write model, random tokens (``tokens.npy``) and a text (``text.txt``); return the number of parameters."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(name), dtype=torch.float32)
    model.save_pretrained(directory / "model")
    ids = np.random.default_rng(0).integers(0, VOCABULARY, NUM_TOKENS, dtype=np.int32)
    np.save(directory / "tokens.npy", ids)
    write_text(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def write_text(directory: Path) -> None:
    """Write some megabytes of real text, and a tokenizer trained on it beside the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    library = Path(sysconfig.get_paths()["stdlib"])
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(library.glob("*.py")))
    (directory / "text.txt").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True)[:40_000], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(
        directory / "model"
    )


if __name__ == "__main__":
    print(f"{write(sys.argv[1], Path(sys.argv[2]))} parameters")
