"""Text piece by piece: over kinds of tokenizers and scripts, the pieces are the text, and they come as tokens come."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outsize.wrapped.writing.detokenizer import Detokenizer, text_of

SPECIAL = ["<unk>", "<s>", "</s>"]
TEXTS = {
    "code": "\n    if x:\n        return 1\n\telse:\n        return  2\n\nprint(f(3))",
    "emoji": " Hi 😀👍🏽 and 🇫🇷 👨‍👩‍👧‍👦 é ñ — done, ok. Don't we 're go . I ' ve , is n't it ?",
    "thai": "สวัสดีชาวโลกนี่คือการทดสอบข้อความยาวโดยไม่มีช่องว่าง",
    "kana": "こんにちはせかいこれはてすとですありがとうございました",
    "chinese": "今天天气很好，我们去公园散步吧。",
    "arabic": "مرحبا بالعالم هذا اختبار",
    "marks": "e\u0301a\u0308o\u0302 \u0915\u094d\u0937\u093f नमस्ते दुनिया",
    "base64": "aGVsbG8gd29ybGQhIHRoaXMgaXMgYSBsb25nIGJhc2U2NCBzdHJpbmc=",
    "url": "https://example.org/a/b?c=d&e=%20f#g",
    "json": '{"a":[1,2,{"b":"c"}],"d":null}',
    "spaces": "   three   and\n\n\n   more \t end  ",
}
UNSPACED = ("thai", "kana", "chinese", "base64", "url")


def fast(raw: Tokenizer, **settings: Any) -> PreTrainedTokenizerFast:
    raw.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **settings
    )


def byte_level(**settings: Any) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS.values(), trainer)
    return fast(raw, **settings)


def byte_fallback(strips: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are a mark, the first is taken away, and what is unknown is bytes."""
    known = ["▁", "\n", "▁▁", "▁▁▁▁", *"abcdefghijklmnopqrstuvwxyz(){}:=123,.'"]
    pairs = [("▁", "▁"), ("▁▁", "▁▁")]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *known])}
    raw = Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if strips else []
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return fast(raw)


def metaspace() -> PreTrainedTokenizerFast:
    """As T5's."""
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    letters = sorted(set("".join(TEXTS.values())))
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        unk_token="<unk>",
        initial_alphabet=letters,
        show_progress=False,
    )
    raw.train_from_iterator(TEXTS.values(), trainer)
    return fast(raw)


def word_piece(**settings: Any) -> PreTrainedTokenizerFast:
    """As BERT's."""
    letters = sorted({letter for text in TEXTS.values() for letter in text if letter.strip()})
    vocab = {token: i for i, token in enumerate([*SPECIAL, *letters, *(f"##{letter}" for letter in letters)])}
    raw = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.decoder = decoders.WordPiece(cleanup=settings.get("clean_up_tokenization_spaces", False))
    return fast(raw, **settings)


def end_of_word() -> PreTrainedTokenizerFast:
    """As the first GPT's."""
    letters = sorted({letter for text in TEXTS.values() for letter in text if letter.strip()})
    vocab = {
        token: i for i, token in enumerate([*SPECIAL, *letters, *(f"{letter}</w>" for letter in letters)])
    }
    raw = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", end_of_word_suffix="</w>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.BPEDecoder(suffix="</w>")
    return fast(raw)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "byte-level, cleaned": lambda: byte_level(
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    ),
    "byte fallback": byte_fallback,
    "byte fallback, kept space": lambda: byte_fallback(strips=False),
    "metaspace": metaspace,
    "word pieces": word_piece,
    "word pieces, cleaned": lambda: word_piece(clean_up_tokenization_spaces=True),
    "end of word": end_of_word,
}
tokenizer_of = cache(lambda kind: KINDS[kind]())


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*map(detokenizer.put, ids), detokenizer.end()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_as_the_tokenizer_decodes_it(kind: str, text: str):
    tokenizer = tokenizer_of(kind)
    for written in (TEXTS[text], TEXTS[text] * 8):
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_pieces_of_any_texts_end_to_end_are_the_text(kind: str, data: st.DataObject):
    tokenizer = tokenizer_of(kind)
    parts = st.one_of(st.sampled_from(sorted(TEXTS.values())), st.text(max_size=12), st.sampled_from(SPECIAL))
    text = "".join(data.draw(st.lists(parts, max_size=6)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text_of(tokenizer, ids)[0] == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_tokens_that_are_no_text_are_shown_as_the_tokenizer_shows_them(data: st.DataObject):
    """Of a model that has learned nothing: any bytes in any order."""
    tokenizer = tokenizer_of("byte-level")
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=90))
    assert text_of(tokenizer, ids)[0] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback", "byte fallback, kept space"])
@pytest.mark.parametrize("text", UNSPACED)
def test_a_piece_comes_with_every_token_that_completes_a_character(kind: str, text: str):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer(TEXTS[text], add_special_tokens=False)["input_ids"]
    pieces, complete = pieces_of(tokenizer, ids), 0
    for count in range(1, len(ids) + 1):
        text_so_far = tokenizer.decode(ids[:count], skip_special_tokens=True)
        if not text_so_far.endswith("\ufffd"):
            complete = len(text_so_far)
        assert sum(map(len, pieces[:count])) == complete
    assert pieces[-1] == ""


def test_characters_before_bytes_that_are_none_stay_as_they_were_shown():
    """The tokenizer makes U+FFFD of all bytes around them; a reader has read them already."""
    tokenizer = tokenizer_of("byte fallback")
    character = tokenizer("好", add_special_tokens=False)["input_ids"][1:]
    ids = [*character, tokenizer.convert_tokens_to_ids("<0xE4>"), tokenizer.convert_tokens_to_ids("a")]
    assert tokenizer.decode(ids) == "\ufffd" * 4 + "a"
    assert text_of(tokenizer, ids)[0] == "好\ufffda"
