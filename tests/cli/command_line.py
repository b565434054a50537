"""What tests of commands share: a model that a command is given, and the status that it ends with."""

import pytest

from outsize.cli import main

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}


def status_of(*arguments: object) -> int:
    """Run a command and return its exit status."""
    with pytest.raises(SystemExit) as done:
        main([str(argument) for argument in arguments])
    return done.value.code or 0
