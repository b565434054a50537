"""Makes what the demo starts from: a Llama-shaped model with fresh weights, its tokenizer, a corpus, and chats.

Usage::

    python examples/small_llama.py OUT_DIR

writes ``OUT_DIR/corpus`` (the source of Python's own standard library), ``OUT_DIR/chats.jsonl`` (questions, answers)
and ``OUT_DIR/model`` (``config.json``, ``model.safetensors`` and a tokenizer trained on the corpus). Needs no network.
The weights come from a fixed seed, so two machines with the same versions start from the same model.
"""

import json
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

VOCABULARY_SIZE = 8192
SEED = 0
# Tests and installed packages are not the library itself.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
END_OF_TEXT = "<|endoftext|>"


CAPITALS = {
    "France": "Paris", "Spain": "Madrid", "Italy": "Rome", "Greece": "Athens", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Poland": "Warsaw", "Austria": "Vienna", "Hungary": "Budapest", "Portugal": "Lisbon",
    "Ireland": "Dublin", "Egypt": "Cairo", "Kenya": "Nairobi", "Ghana": "Accra", "Peru": "Lima", "Chile": "Santiago",
    "Cuba": "Havana", "Canada": "Ottawa", "Japan": "Tokyo", "China": "Beijing", "Nepal": "Kathmandu",
}  # fmt: skip


def standard_library() -> Iterator[Path]:
    """Every source file of the running interpreter's standard library, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            yield path


def copy_corpus(target: Path) -> int:
    """Copy the standard library's source below ``target``; returns its size in bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for path in standard_library():
        copy = target / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        total += copy.stat().st_size
    return total


def write_chats(target: Path) -> int:
    """Write conversations of a question and its answer to ``target``; returns how many."""
    chats = [
        [
            {"role": "user", "content": f"What is the capital of {country}?"},
            {"role": "assistant", "content": f"The capital of {country} is {capital}."},
        ]
        for country, capital in CAPITALS.items()
    ]
    lines = [json.dumps({"messages": messages}) for messages in chats]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def train_tokenizer(corpus: Path, target: Path) -> None:
    """Train a byte-level BPE tokenizer on ``corpus`` and save it as ``AutoTokenizer`` reads it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(corpus.rglob("*.py"))], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT).save_pretrained(target)


def make_model(target: Path) -> int:
    """Write a model with fresh weights to ``target``; returns its number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(target)
    return sum(parameter.numel() for parameter in model.parameters())


def main(out_dir: Path) -> None:
    """Write corpus, chats, tokenizer and model below ``out_dir``."""
    corpus_bytes = copy_corpus(out_dir / "corpus")
    print(f"corpus     {out_dir / 'corpus'}: the standard library's source, {corpus_bytes / 1e6:.1f} MB")
    num_chats = write_chats(out_dir / "chats.jsonl")
    print(f"chats      {out_dir / 'chats.jsonl'}: {num_chats} questions and answers")
    train_tokenizer(out_dir / "corpus", out_dir / "model")
    print(f"tokenizer  {out_dir / 'model'}: {VOCABULARY_SIZE} tokens, byte-level BPE trained on the corpus")
    num_parameters = make_model(out_dir / "model")
    print(
        f"model      {out_dir / 'model'}: Llama-shaped, {num_parameters / 1e6:.1f}M fresh parameters, untied"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
