"""Makes what the demo starts from: a Llama-shaped model with fresh weights, its tokenizer, a corpus, and chats.

Usage::

    python examples/small_llama.py OUT_DIR

writes ``OUT_DIR/corpus`` (the source of Python's own standard library), ``OUT_DIR/chats.jsonl`` (questions, answers)
and ``OUT_DIR/model`` (``config.json``, ``model.safetensors`` and a tokenizer trained on the corpus). Needs no network.
The weights come from a fixed seed, so two machines with the same versions start from the same model.
"""

import argparse
import json
import shutil
import struct
import sysconfig
from collections.abc import Iterator
from pathlib import Path

VOCABULARY_SIZE = 8192
SEED = 0
# Tests and installed packages are not the library itself.
SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
UNKNOWN, END_OF_TEXT = "<unk>", "<|endoftext|>"
SPACE = "▁"  # in place of " ", as sentencepiece has it


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
    """Train a BPE tokenizer of Llama 2's form on ``corpus``, and save it as ``AutoTokenizer`` and llama.cpp read it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [UNKNOWN, END_OF_TEXT]
    spaces = normalizers.Replace(" ", SPACE)
    # What pieces are learned in: spaces, letters with the space before them, signs, lines.
    words = pre_tokenizers.Split(
        Regex(f"{SPACE}+(?={SPACE})|{SPACE}?[^\\W_]+|\\n+|{SPACE}?[^\\w\\s]+|."), "isolated"
    )
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = spaces, words
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(special) - len(bytes_), limit_alphabet=128, show_progress=False
    )
    trained.train([str(path) for path in sorted(corpus.rglob("*.py"))], trainer)
    learned = sorted(trained.get_vocab().items(), key=lambda piece: piece[1])
    pieces = [*special, *bytes_, *(piece for piece, _ in learned)]
    known = {piece: number for number, piece in enumerate(pieces)}
    # As sentencepiece joins: whatever two pieces make a third, the third that was learned first.
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[len(special) + len(bytes_) :]
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
    tokenizer = Tokenizer(models.BPE(known, merges, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, eos_token=END_OF_TEXT, add_prefix_space=False
    ).save_pretrained(target)
    (target / "tokenizer.model").write_bytes(sentencepiece_model(pieces, len(special)))


def sentencepiece_model(pieces: list[str], num_special: int) -> bytes:
    """Return pieces as the protocol buffer of a ``tokenizer.model``, which llama.cpp's converter reads."""

    def number_of(value: int) -> bytes:
        low, high = value & 127, value >> 7
        return bytes((low | 128,)) + number_of(high) if high else bytes((low,))

    def field(number: int, content: bytes | int) -> bytes:
        if isinstance(content, int):
            return number_of(number << 3) + number_of(content)
        return number_of(number << 3 | 2) + number_of(len(content)) + content

    def piece(text: str, number: int) -> bytes:
        kind = 2 if text == UNKNOWN else 3 if number < num_special else 6 if number < num_special + 256 else 1
        score = bytes((2 << 3 | 5,)) + struct.pack("<f", -number)
        return field(1, field(1, text.encode()) + score + field(3, kind))

    of_training = field(3, 2) + field(35, 1)  # BPE, with bytes in place of what is unknown
    of_spaces = field(3, 0) + field(4, 0)  # neither one added before the text nor several made one
    return b"".join(map(piece, pieces, range(len(pieces)))) + field(2, of_training) + field(3, of_spaces)


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
        eos_token_id=1,
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
    print(
        f"tokenizer  {out_dir / 'model'}: {VOCABULARY_SIZE} tokens, BPE trained on the corpus, as Llama 2 has it"
    )
    num_parameters = make_model(out_dir / "model")
    print(
        f"model      {out_dir / 'model'}: Llama-shaped, {num_parameters / 1e6:.1f}M fresh parameters, untied"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out_dir", type=Path)
    main(parser.parse_args().out_dir)
