"""Make what every runner trains on: a Llama-shaped model with fresh fp32 weights, token ids, and the batches.

The text is the source of Python's own standard library; the tokenizer is trained on it here. The batches are
those that `outsize` draws from the tokens, written out so that its peers train on the same ones in the same
order.
"""

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 8192
SHAPES: dict[str, dict[str, int]] = {
    "34M": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "100M": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
}


def source_texts(limit_bytes: int) -> list[str]:
    """Return the standard library's modules in name order until they hold ``limit_bytes``."""
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
        if sum(map(len, texts)) >= limit_bytes:
            break
    return texts


def make_tokenizer(directory: Path, texts: list[str]) -> Any:
    """Train a byte-level BPE tokenizer on ``texts`` and save it in ``directory`` in Hugging Face form."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<eos>")
    tokenizer.save_pretrained(directory)
    return tokenizer


def make_model(directory: Path, size: str, max_positions: int) -> int:
    """Save a model of the given size with seeded random weights; return its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=max_positions,
        tie_word_embeddings=False,
        **SHAPES[size],
    )
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def draw_batches(tokens: Path, steps: int, microbatches: int, sequences: int, seq_len: int) -> Any:
    """Return the token ids that a run with seed 0 trains on, shape [step, microbatch, sequence, position]."""
    from outsize.data import Corpus, ModelLimits, open_data

    with (
        tempfile.TemporaryDirectory() as cache,
        open_data(
            Corpus(path=tokens, format="tokens"),
            None,
            seq_len=seq_len,
            cache_dir=cache,
            limits=ModelLimits(vocab_size=VOCABULARY),
        ) as dataset,
    ):
        rows = [dataset.batch(step, microbatches * sequences).input_ids.numpy() for step in range(steps)]
    return np.stack(rows).reshape(steps, microbatches, sequences, seq_len).astype(np.int32)


def prepare(
    directory: Path, *, size: str, steps: int, microbatches: int, tokens_per_step: int, seq_len: int
) -> int:
    """Make ``model/``, ``tokens.npy`` and ``batches.npz`` in ``directory``; return the number of parameters.

    Raises:
        ValueError: the step does not split into equal microbatches of whole sequences.
    """
    sequences, rest = divmod(tokens_per_step, seq_len * microbatches)
    if rest:
        raise ValueError(f"{tokens_per_step} tokens are not {microbatches} microbatches of whole {seq_len}s")
    directory.mkdir(parents=True, exist_ok=True)
    num_parameters = make_model(directory / "model", size, max_positions=seq_len)
    texts = source_texts(limit_bytes=2_000_000)
    tokenizer = make_tokenizer(directory / "model", texts)
    ids = [np.asarray([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32) for text in texts]
    np.save(directory / "tokens.npy", np.concatenate(ids))
    batches = draw_batches(directory / "tokens.npy", steps, microbatches, sequences, seq_len)
    np.savez(directory / "batches.npz", input_ids=batches)
    return num_parameters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is prepared."""
    parser.add_argument("--size", choices=SHAPES, default="34M")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps per run")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--seq-len", type=int, default=256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    add_arguments(parser)
    arguments = vars(parser.parse_args())
    print(f"{prepare(arguments.pop('directory'), **arguments):,} parameters")


if __name__ == "__main__":
    main()
