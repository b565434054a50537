import logging
from types import SimpleNamespace

import pytest

from outsize.data.encode import BATCH_CHARS, Encoder, _plain_backend, batches
from outsize.data.reading.formats import Document
from outsize.errors import DataError

TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello, how are you?"},
    {"role": "assistant", "content": "I am fine."},
    {"role": "user", "content": "and é?"},
    {"role": "assistant", "content": "fine, too"},
]


def runs(tokenizer, encoded):
    """Return the decoded text of trained tokens and of the others, each joined by bars per run."""
    texts = {0: [], 1: []}
    last = None
    for token, trained in zip(encoded.ids.tolist(), encoded.trained.tolist(), strict=True):
        if trained != last:
            texts[trained].append([])
        texts[trained][-1].append(token)
        last = trained
    return {key: [tokenizer.decode(run) for run in value] for key, value in texts.items()}


def encode_one(tokenizer, document, eos=True, masked=True):
    return Encoder(tokenizer, eos=eos, masked=masked).encode([document])[0]


def test_text_gets_what_the_tokenizer_adds_and_eos(make):
    tokenizer = make(bos=True)
    encoded = encode_one(tokenizer, Document("f:1", "hello fox"), masked=False)
    assert tokenizer.decode(encoded.ids) == "<s>hello fox<|endoftext|>"
    assert encoded.trained is None
    assert (
        tokenizer.decode(encode_one(tokenizer, Document("f:1", "x"), eos=False, masked=False).ids) == "<s>x"
    )


@pytest.mark.parametrize("masked", [False, True])
def test_what_a_text_begins_or_ends_with_already_is_not_put_there_again(make, masked):
    tokenizer = make(bos=True)
    for text in ("<s>hello fox<|endoftext|>", "hello fox<|endoftext|>", "<s>hello fox", "hello fox"):
        encoded = encode_one(tokenizer, Document("f:1", text), masked=masked)
        assert tokenizer.decode(encoded.ids) == "<s>hello fox<|endoftext|>"
    assert tokenizer.decode(encode_one(tokenizer, Document("f:1", "<s>")).ids) == "<s><|endoftext|>"


def test_pieces_get_special_tokens_at_the_ends_of_the_document_only(make):
    tokenizer = make(bos=True)
    pieces = [
        Document("f:1", "hello ", closes=False),
        Document("f:1", "fox ", opens=False, closes=False),
        Document("f:1", "dog", opens=False),
    ]
    encoded = Encoder(tokenizer, eos=True, masked=False).encode(pieces)
    assert [tokenizer.decode(e.ids) for e in encoded] == ["<s>hello ", "fox ", "dog<|endoftext|>"]
    assert [e.closes for e in encoded] == [False, False, True]


def called(tokenizer, texts, masked):
    """What calling the tokenizer itself gives, whatever it is."""
    told = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=masked)
    return told["input_ids"], told.get("offset_mapping")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "text", ["hello fox", "and é?  \n\n🦊 <s> <|im_end|>", "", "a" * 200, "the quick brown fox"]
)
def test_the_backend_alone_gives_what_a_call_of_the_tokenizer_gives(make, monkeypatch, text, masked):
    tokenizer = make(bos=True)
    documents = [Document("f:1", text), Document("f:2", "hello, how are you?")]
    backend_alone = Encoder(tokenizer, eos=True, masked=masked).encode(documents)
    monkeypatch.setattr("outsize.data.encode._plain_backend", lambda _: None)
    by_a_call = Encoder(tokenizer, eos=True, masked=masked).encode(documents)
    for one, other in zip(backend_alone, by_a_call, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert (one.trained is None) == (other.trained is None) == (not masked)
        assert one.trained is None or one.trained.tolist() == other.trained.tolist()
    ids, _ = called(tokenizer, [text], masked)
    assert backend_alone[0].ids[1 : 1 + len(ids[0])].tolist() == ids[0]


def test_a_tokenizer_that_does_more_than_its_backend_is_called(make):
    tokenizer = make()
    assert _plain_backend(tokenizer) is tokenizer.backend_tokenizer

    class Own(type(tokenizer)):
        def _encode_plus(self, *args, **kwargs):
            return super()._encode_plus(*args, **kwargs)

    own = Own(tokenizer_object=tokenizer.backend_tokenizer)
    assert _plain_backend(own) is None
    tokenizer.backend_tokenizer.enable_truncation(2)
    assert _plain_backend(tokenizer) is None
    assert len(Encoder(tokenizer, eos=False, masked=False).encode([Document("f:1", "a b c d")])[0].ids) > 2
    tokenizer.backend_tokenizer.enable_padding(length=99)
    assert _plain_backend(tokenizer) is None
    assert _plain_backend(SimpleNamespace(is_fast=False)) is None


def test_a_tokenizer_without_eos_is_logged(make, caplog):
    tokenizer = make(eos_token=None)
    with caplog.at_level(logging.WARNING):
        encoded = encode_one(tokenizer, Document("f:1", "fox"), masked=False)
    assert tokenizer.decode(encoded.ids) == "fox"
    assert "no EOS token" in caplog.text


@pytest.mark.parametrize(("prompt", "completion"), [("the quick", " brown fox"), ("the quick ", "brown fox")])
def test_only_the_completion_and_its_end_are_trained(tokenizer, prompt, completion):
    # In the second case one token holds the space of the prompt and the first word of the completion.
    encoded = encode_one(tokenizer, Document("f:1", prompt + completion, trained_from=len(prompt)))
    assert runs(tokenizer, encoded) == {0: ["the quick"], 1: [" brown fox<|endoftext|>"]}


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("style", ["marked", "chatml"])
def test_assistant_turns_are_trained_with_their_closing(make, request, style, eos):
    tokenizer = make(request.getfixturevalue(style), eos_token=eos)
    encoded = encode_one(tokenizer, Document("f:1", messages=TURNS, turns=(2, 4)))
    added = (
        "" if eos == "<|im_end|>" else eos
    )  # the template closes turns, not documents, unless that is one token
    assert runs(tokenizer, encoded) == {
        0: [
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello, how are you?<|im_end|>\n"
            "<|im_start|>assistant\n",
            "<|im_start|>user\nand é?<|im_end|>\n<|im_start|>assistant\n",
        ],
        1: ["I am fine.<|im_end|>\n", f"fine, too<|im_end|>\n{added}"],
    }


def test_the_two_ways_to_mask_agree(make, marked, chatml):
    document = Document("f:1", messages=TURNS, turns=(2, 4))
    by_tags, by_prefix = (encode_one(make(template), document) for template in (marked, chatml))
    assert by_tags.ids.tolist() == by_prefix.ids.tolist()
    assert by_tags.trained.tolist() == by_prefix.trained.tolist()


def test_templates_that_rewrite_earlier_turns_are_followed(make):
    # Reasoning templates write a block into the last turn and into the generation prompt; earlier turns
    # do not keep it. What opens it is the reply's, as it is in the marks of TRL's templates.
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if loop.last and m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
    )
    tokenizer = make(template, eos_token="<|im_end|>")
    encoded = encode_one(tokenizer, Document("f:1", messages=TURNS, turns=(2, 4)))
    assert runs(tokenizer, encoded)[1] == ["I am fine.<|im_end|>\n", "<think></think>fine, too<|im_end|>\n"]


def test_a_template_that_hides_turns_is_refused(make):
    template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(
        DataError, match=r"f:9: message 3 cannot be trained: the chat template leaves out the text"
    ):
        encode_one(make(template), Document("f:9", messages=TURNS, turns=(2, 4)))


def test_a_template_that_refuses_names_the_record(make):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        DataError, match="f:9: the chat template refuses this conversation: roles must alternate"
    ):
        encode_one(make(template), Document("f:9", messages=TURNS, turns=(2, 4)))


@pytest.mark.parametrize("eos", ["<|endoftext|>", None])
def test_without_a_template_a_plain_one_is_used(make, eos):
    tokenizer = make(eos_token=eos)
    encoder = Encoder(tokenizer, eos=True, masked=True)
    assert encoder.chat.mask_source == "fallback template"
    encoded = encoder.encode([Document("f:1", messages=TURNS[:3], turns=(2,))])[0]
    assert runs(tokenizer, encoded) == {
        0: ["### system:\nbe brief\n\n### user:\nhello, how are you?\n\n### assistant:\n", "\n"],
        1: [f"I am fine.{eos or ''}"],
    }


@pytest.mark.parametrize("style", ["marked", "chatml"])
def test_a_document_longer_than_the_model_is_no_news(make, request, style, caplog):
    tokenizer = make(request.getfixturevalue(style), model_max_length=4)
    with caplog.at_level(logging.WARNING):
        encoded = encode_one(tokenizer, Document("f:1", messages=TURNS, turns=(2, 4)))
    assert len(encoded.ids) > 4
    assert not caplog.text


def test_mixed_batches_keep_their_order(make, marked):
    tokenizer = make(marked)
    documents = [
        Document("f:1", "fox"),
        Document("f:2", messages=TURNS, turns=(2, 4)),
        Document("f:3", "dog"),
    ]
    encoded = Encoder(tokenizer, eos=True, masked=True).encode(documents)
    assert [tokenizer.decode(e.ids)[:3] for e in encoded] == ["fox", "<|i", "dog"]
    assert all(len(e.ids) == len(e.trained) for e in encoded)


def test_fingerprints_follow_what_changes_tokens(make, chatml):
    def fingerprint(tokenizer, eos=True):
        return Encoder(tokenizer, eos=eos, masked=False).fingerprint()

    tokenizer = make()
    first = fingerprint(tokenizer)
    assert fingerprint(make()) == first
    others = [fingerprint(make(chatml)), fingerprint(make(bos=True)), fingerprint(tokenizer, eos=False)]
    tokenizer.add_tokens(["newword"])
    others.append(fingerprint(tokenizer))
    assert len({first, *others}) == 5


def test_fingerprints_forget_how_the_last_call_padded(make):
    tokenizer = make(pad_token="<|im_end|>")
    before = Encoder(tokenizer, eos=True, masked=False).fingerprint()
    tokenizer(["fox", "the lazy dog"], padding=True, truncation=True, max_length=5)
    assert Encoder(tokenizer, eos=True, masked=False).fingerprint() == before


def test_batches_are_bounded():
    documents = [Document("f:1", "x" * (BATCH_CHARS // 3)) for _ in range(10)] + [
        Document("f:2", "y" * 2 * BATCH_CHARS)
    ]
    grouped = list(batches(documents))
    assert [document for batch in grouped for document in batch] == documents
    assert [len(batch) for batch in grouped] == [3, 3, 3, 1, 1]
    assert [len(batch) for batch in batches(Document("f:1", "z") for _ in range(300))] == [256, 44]
