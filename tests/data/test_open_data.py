import gzip
import json
import logging
import os
import threading
from dataclasses import fields

import numpy as np
import pytest
import torch
import zstandard
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from outsize.data import IGNORED, Corpus, ModelLimits, Prefetcher, open_data
from outsize.errors import ConfigError, DataError, StorageError

LINES = [f"the quick brown fox {i} jumps over the lazy dog é\n" for i in range(300)]
EOS = 0
CORPUS, LIMITS = ({field.name for field in fields(kind)} for kind in (Corpus, ModelLimits))


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def all_tokens(dataset):
    """Return the tokens that one epoch uses, as a set of rows in data order."""
    batch = dataset.batch(0, dataset.num_sequences)
    return sorted(map(tuple, batch.input_ids.tolist()))


def open_small(path, tokenizer, cache_dir, **options):
    how = {name: options.pop(name) for name in [*options] if name in CORPUS}
    limits = ModelLimits(**{name: options.pop(name) for name in [*options] if name in LIMITS})
    corpus = Corpus(path=path, **how)
    return open_data(
        corpus, tokenizer, **{"seq_len": 16, "cache_dir": cache_dir, "limits": limits, **options}
    )


def test_a_text_file_is_packed_whole(tmp_path, tokenizer, cache_dir):
    path = tmp_path / "a.txt"
    path.write_text("".join(LINES), encoding="utf-8")
    expected = [*tokenizer("".join(LINES))["input_ids"], EOS]
    with open_small(path, tokenizer, cache_dir) as dataset:
        kept = len(expected) // 16 * 16
        rows = np.array(expected[:kept]).reshape(-1, 16).tolist()
        assert all_tokens(dataset) == sorted(map(tuple, rows))
        detected = dataset.detected
    assert (detected.format, detected.num_files, detected.num_documents) == ("text", 1, 1)
    assert detected.num_tokens == detected.num_trained_tokens == len(expected)
    assert detected.max_token_id == max(expected)
    assert detected.example.startswith("the quick brown fox 0 jumps over the lazy dog é\n")


TEXT, PAIR = {"text": "the quick fox"}, {"prompt": "the quick", "completion": " fox"}
CHAT = {"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "fox"}]}


@pytest.mark.parametrize(
    ("record", "option", "value", "is_told"),
    [
        *[(TEXT, "train_on", value, True) for value in ("last", "all")],
        (PAIR, "train_on", "all", False),
        *[(record, "text_field", "body", True) for record in (PAIR, CHAT)],
        ({"body": "the quick fox"}, "text_field", "body", False),
        *[(record, "roles", {"agent": "assistant"}, True) for record in (TEXT, PAIR)],
        (CHAT, "roles", {"agent": "assistant"}, False),
        *[(record, "template", "plain", True) for record in (TEXT, PAIR)],
        (CHAT, "template", "plain", False),
    ],
)
def test_a_setting_for_records_of_another_kind_is_told(
    tmp_path, tokenizer, cache_dir, record, option, value, is_told
):
    path = write_jsonl(tmp_path / "a.jsonl", [record] * 40)
    with open_small(path, tokenizer, cache_dir, **{option: value}) as dataset:
        told = [note for note in dataset.detected.notes if note.startswith(f"data.{option} has no effect: ")]
        assert len(told) == len(dataset.detected.notes) == is_told


def test_long_documents_in_pieces_lose_nothing(tmp_path, tokenizer, cache_dir):
    text = "".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(3000))
    path = tmp_path / "a.py"
    path.write_text(text)
    record = write_jsonl(tmp_path / "a.jsonl", [{"text": text}])
    for source in (path, record):
        with open_small(source, tokenizer, cache_dir, seq_len=200_000, pack="none") as dataset:
            assert dataset.detected.num_documents == 1
            batch = dataset.batch(0, 1)
        assert tokenizer.decode(batch.input_ids[0, : batch.attention_mask.sum()]) == text + "<|endoftext|>"


def test_a_directory_is_many_documents_and_broken_files_are_left_out(tmp_path, tokenizer, cache_dir, caplog):
    source = tmp_path / "source"
    source.mkdir()
    for i in range(5):
        (source / f"{i}.py").write_text(LINES[i])
    (source / "latin.py").write_bytes("é = 1".encode("latin-1"))
    (source / "empty.py").write_text("")
    (source / "image.png").write_bytes(b"\0")
    with caplog.at_level(logging.WARNING), open_small(source, tokenizer, cache_dir, pack="none") as dataset:
        detected = dataset.detected
        batch = dataset.batch(0, 5)
    assert (detected.num_documents, detected.num_files, detected.num_skipped_files) == (5, 6, 2)
    assert "latin.py is not UTF-8 text" in caplog.text
    assert batch.attention_mask is not None
    with pytest.raises(DataError, match=r"latin.py:1: not UTF-8"):
        open_small(source / "latin.py", tokenizer, cache_dir)


RECORDS = {
    "text": [{"text": line} for line in LINES],
    "messages": [
        {"messages": [{"role": "user", "content": line}, {"role": "assistant", "content": "yes"}]}
        for line in LINES
    ],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": line}, {"from": "gpt", "value": "yes"}]}
        for line in LINES
    ],
    "prompt_completion": [{"prompt": line, "completion": "yes"} for line in LINES],
    "alpaca": [{"instruction": line, "input": "", "output": "yes"} for line in LINES],
}


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_is_detected_and_masked(tmp_path, make, chatml, cache_dir, name):
    tokenizer = make(chatml)
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS[name])
    with open_small(path, tokenizer, cache_dir) as dataset:
        detected = dataset.detected
        batch = dataset.batch(0, dataset.num_sequences)
    assert (detected.format, detected.forced, detected.fields) == (name, False, tuple(RECORDS[name][0]))
    assert detected.num_documents == len(LINES)
    trained = batch.labels != IGNORED
    assert torch.equal(batch.labels[trained], batch.input_ids[trained])
    if name == "text":
        assert trained.all()
        return
    assert detected.num_trained_tokens < detected.num_tokens / 2
    assert ">>" in detected.example
    assert detected.example.split(">>")[1].startswith("yes")
    words = tokenizer.decode(batch.input_ids[trained])
    for special in ("<|endoftext|>", "<|im_end|>", "\n"):
        words = words.replace(special, "")
    assert set(words) == set("yes")
    assert abs(len(words) - len("yes") * len(LINES)) <= 2 * len("yes")  # all, but for the dropped remainder


def test_containers_and_compression_give_the_same_tokens(tmp_path, tokenizer, cache_dir):
    records = RECORDS["prompt_completion"]
    lines = write_jsonl(tmp_path / "a.jsonl", records).read_bytes()
    (tmp_path / "a.json").write_text(json.dumps(records, indent=1))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    names = ["a.jsonl", "a.json", "a.jsonl.gz", "a.jsonl.zst"]
    tokens = [all_tokens(open_small(tmp_path / name, tokenizer, cache_dir)) for name in names]
    assert tokens[0]
    assert all(other == tokens[0] for other in tokens[1:])
    assert len(os.listdir(cache_dir)) == 4


def test_a_format_can_be_forced(tmp_path, tokenizer, cache_dir):
    records = [{**record, "text": "plain words"} for record in RECORDS["messages"]]  # type: ignore[attr-defined]
    path = write_jsonl(tmp_path / "data.strange", records)
    with open_small(path, tokenizer, cache_dir, format="messages") as dataset:
        assert (dataset.detected.format, dataset.detected.forced) == ("messages", True)
    path = write_jsonl(tmp_path / "data.jsonl", records)
    with open_small(path, tokenizer, cache_dir, format="text") as dataset:
        assert dataset.detected.format == "text"
        assert dataset.detected.example == "plain words<|endoftext|>"
    with open_small(path, tokenizer, cache_dir, text_field="absent") as dataset:
        assert dataset.detected.format == "messages"
    with pytest.raises(ConfigError, match="unknown data format 'chat'; known are auto"):
        open_small(path, tokenizer, cache_dir, format="chat")


def test_empty_records_are_left_out_and_counted(tmp_path, tokenizer, cache_dir):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, *RECORDS["text"]])
    with open_small(path, tokenizer, cache_dir) as dataset:
        assert (dataset.detected.num_empty, dataset.detected.num_documents) == (1, 300)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("a.txt", "", "empty"),
        ("a.jsonl", "", "empty"),
        ("a.jsonl", "\n \n", "empty"),
        ("a.json", "[]", "empty"),
        ("a.jsonl", '{"text": ""}\n', "empty"),
        (
            "a.jsonl",
            '{"text": "a b c"}\n{"messages": []}\n',
            r"a.jsonl:2: a record of format 'text' needs 'text'",
        ),
        ("a.jsonl", '{"text": "a b c"}\n{"text": \n', r"a.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"body": "a b c"}\n', r"a.jsonl:1: no known format"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "hello"}]}\n', "no token is trained"),
        ("a.txt", "short", r"fewer than one sequence of 16"),
        ("a.txt", "a\nb\0", r"a.txt:2: not a text file"),
    ],
)
def test_bad_data_gives_one_error_and_leaves_nothing_half_written(
    tmp_path, make, chatml, cache_dir, name, body, message
):
    path = tmp_path / name
    path.write_text(body)
    with pytest.raises(DataError, match=message):
        open_small(path, make(chatml), cache_dir)
    if cache_dir.exists():
        assert all((entry / "index.json").exists() for entry in cache_dir.iterdir())


def test_limits_of_the_model(tmp_path, tokenizer, cache_dir):
    path = tmp_path / "a.txt"
    path.write_text("".join(LINES))
    with pytest.raises(ConfigError, match="seq_len 16 is longer than the 8 positions"):
        open_small(path, tokenizer, cache_dir, max_positions=8)
    with pytest.raises(
        DataError, match=r"document 1: token id \d+ \(.*\) is outside the 100 rows of the model's embedding"
    ):
        open_small(path, tokenizer, cache_dir, vocab_size=100)
    fox = tmp_path / "fox.txt"
    fox.write_text("fox")
    tokenizer_with_gaps = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"?": 0, "fox": 7}, unk_token="?"))
    )
    with pytest.raises(DataError, match=r"token id 7 .*is outside the 5 rows"):
        open_small(fox, tokenizer_with_gaps, tmp_path / "other", vocab_size=5)
    with pytest.raises(ConfigError, match="at least 2"):
        open_small(path, tokenizer, cache_dir, seq_len=1)
    assert not list(cache_dir.glob("*"))
    open_small(path, tokenizer, cache_dir, max_positions=16, vocab_size=len(tokenizer)).close()


def test_the_cache_is_reused_until_something_changes(tmp_path, make, tokenizer, cache_dir):
    path = tmp_path / "a.txt"
    path.write_text("".join(LINES))
    calls = []

    def opened(which=tokenizer, **options):
        calls.clear()
        with open_small(path, which, cache_dir, progress=lambda *p: calls.append(p), **options) as dataset:
            return dataset.detected, all_tokens(dataset)

    first = opened()
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)
    assert opened() == first
    assert opened(seed=5) == first
    assert not calls
    for options in ({"which": make(bos=True)}, {"format": "text"}):
        opened(**options)
        assert calls
    os.utime(path, ns=(1, 1))
    assert opened() == first
    assert calls
    assert len(os.listdir(cache_dir)) == 4


def test_an_unwritable_cache(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("".join(LINES))
    with pytest.raises(StorageError, match="choose another cache_dir"):
        open_small(path, tokenizer, path / "below-a-file")


def test_an_interrupt_while_tokenising_leaves_nothing_and_the_next_call_works(tmp_path, tokenizer, cache_dir):
    path = tmp_path / "a.txt"
    path.write_text("".join(LINES))

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_small(path, tokenizer, cache_dir, progress=interrupt)
    assert os.listdir(cache_dir) == []
    open_small(path, tokenizer, cache_dir).close()


@pytest.mark.parametrize("dtype", ["<i4", "<u2", "<u4", "<i8"])
def test_npy_tokens_are_read_in_place(tmp_path, tokenizer, cache_dir, dtype):
    path = tmp_path / "a.npy"
    np.save(path, (np.arange(1000) % 300).astype(dtype))
    with open_small(path, tokenizer, cache_dir) as dataset:
        assert all_tokens(dataset) == sorted(
            tuple((np.arange(i, i + 16) % 300).tolist()) for i in range(0, 992, 16)
        )
        assert dataset.detected.format == "tokens"
        assert dataset.detected.num_tokens == 1000
        assert dataset.detected.max_token_id == 299
    assert not cache_dir.exists()


@pytest.mark.parametrize("dtype", ["<i4", "<u2"])
def test_bin_tokens_tell_their_type_and_continue_over_files(tmp_path, tokenizer, cache_dir, dtype):
    tokens = np.random.default_rng(0).integers(0, len(tokenizer), 2000).astype(dtype)
    source = tmp_path / "shards"
    source.mkdir()
    for i, part in enumerate(np.split(tokens, [500, 600])):
        part.tofile(source / f"{i}.bin")
    with open_small(source, tokenizer, cache_dir) as dataset:
        assert dataset.detected.fields == (np.dtype(dtype).name,)
        assert all_tokens(dataset) == sorted(map(tuple, tokens.reshape(-1, 16).tolist()))
        assert (dataset.detected.num_files, dataset.detected.num_documents) == (3, None)
    with pytest.raises(ConfigError, match=r"data.pack: .*set it to stream"):
        open_small(source, tokenizer, cache_dir, pack="none")
    with pytest.raises(ConfigError, match="holds tokens, not format 'messages'"):
        open_small(source, tokenizer, cache_dir, format="messages")


def test_tokens_need_no_tokenizer_but_text_does(tmp_path, cache_dir):
    np.save(tmp_path / "a.npy", np.arange(100, dtype="<i4"))
    with open_small(tmp_path / "a.npy", None, cache_dir, vocab_size=100) as dataset:
        assert dataset.detected.example.startswith("0 1 2 3 ")
        assert dataset.num_sequences == 6
    with pytest.raises(DataError, match=r"token id 99 .* outside the vocabulary of 50"):
        open_small(tmp_path / "a.npy", None, cache_dir, vocab_size=50)
    with pytest.raises(ConfigError, match="needs vocab_size or a tokenizer"):
        open_small(tmp_path / "a.npy", None, cache_dir)
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        open_small(tmp_path / "a.txt", None, cache_dir)


def save(path, array):
    np.save(path, array) if path.suffix == ".npy" else array.tofile(path)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("a.npy", np.array([1, 2, 5000] * 10, "<i4"), "token id 5000 .* outside the vocabulary"),
        ("a.npy", np.array([1, 2, -5] * 10, "<i4"), "token id -5 "),
        ("a.npy", np.zeros(100, "<f4"), "expected one dimension of int32"),
        ("a.npy", np.zeros((10, 10), "<i4"), "expected one dimension of int32"),
        ("a.npy", np.zeros(0, "<i4"), "empty"),
        ("a.bin", np.zeros(0, "<i4"), "empty"),
        ("a.bin", np.full(100, 60000, "<u2"), "neither int32 nor uint16"),
        ("a.bin", np.zeros(33, "u1"), "neither int32 nor uint16"),
    ],
)
def test_token_files_that_do_not_fit(tmp_path, tokenizer, cache_dir, name, array, message):
    save(tmp_path / name, array)
    with pytest.raises(DataError, match=message):
        open_small(tmp_path / name, tokenizer, cache_dir)


def test_damaged_npy(tmp_path, tokenizer, cache_dir):
    path = tmp_path / "a.npy"
    np.save(path, np.zeros(1000, "<i4"))
    os.truncate(path, 500)
    with pytest.raises(DataError, match="cut short: 500 bytes"):
        open_small(path, tokenizer, cache_dir)
    path.write_bytes(b"not numpy")
    with pytest.raises(DataError, match=r"not a \.npy file"):
        open_small(path, tokenizer, cache_dir)


def test_what_is_printed(tmp_path, make, chatml, cache_dir):
    records = [*RECORDS["messages"], {"messages": [{"role": "user", "content": "a\nb"}]}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    with open_small(path, make(chatml), cache_dir) as dataset:
        share = f"{dataset.detected.trained_share:.1%}"
        lines, shown = dataset.detected.describe().splitlines(), dataset.shown().splitlines()
    assert lines[0] == "data: format messages (detected, fields messages), 1 file"
    assert lines[1].startswith("  301 documents, ")
    assert lines[1].endswith(f"k tokens, {share} trained (sentinels)")
    assert lines[2] == "  1 document with nothing to train"
    assert shown[1:] == [
        "  | <|im_start|>user",
        "  | the quick brown fox 0 jumps over the lazy dog é",
        "  | <|im_end|>",
        "  | <|im_start|>assistant",
        "  | >>yes<|im_end|>",
        "  | <|endoftext|><<",
    ]


ASKED = [{"role": "user", "content": "why"}]


@pytest.mark.parametrize(
    "records",
    [
        RECORDS["messages"],
        [{"prompt": ASKED, "completion": [{"role": "assistant", "content": line}]} for line in LINES],
        [{"instruction": line, "output": "yes", "history": [["a", "b"]]} for line in LINES],
    ],
)
def test_a_missing_chat_template_is_said_each_time(tmp_path, tokenizer, cache_dir, records):
    path = write_jsonl(tmp_path / "a.jsonl", records)
    for _ in range(2):
        with open_small(path, tokenizer, cache_dir) as dataset:
            assert "(fallback template: the tokenizer has no chat template)" in dataset.describe()


def test_prefetched_batches_equal_direct_ones(tmp_path, tokenizer, cache_dir):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS["prompt_completion"])
    with open_small(path, tokenizer, cache_dir) as dataset:
        with Prefetcher(dataset, num_sequences=4, start_step=7) as prefetcher:
            ahead = [prefetcher.next() for _ in range(10)]
        for step, batch in enumerate(ahead, start=7):
            direct = dataset.batch(step, 4)
            assert torch.equal(batch.input_ids, direct.input_ids)
            assert torch.equal(batch.labels, direct.labels)
    with Prefetcher(dataset, num_sequences=4) as prefetcher, pytest.raises(DataError, match="closed"):
        prefetcher.next()
    assert "outsize-data" not in [thread.name for thread in threading.enumerate()]


def test_tables_are_read_by_their_columns(tmp_path, tokenizer, cache_dir):
    """A quoted cell may hold the separator and lines of its own."""
    (tmp_path / "a.csv").write_text('question,answer\n"a, b\nc",yes\nd,"say ""no"""\n')
    (tmp_path / "a.tsv").write_text('question\tanswer\n"a, b\nc"\tyes\nd\t"say ""no"""\n')
    write_jsonl(
        tmp_path / "a.jsonl",
        [{"prompt": "a, b\nc", "completion": "yes"}, {"prompt": "d", "completion": 'say "no"'}],
    )
    columns = {"prompt": "question", "completion": "answer"}
    found = []
    for name in ("a.csv", "a.tsv", "a.jsonl"):
        how = {} if name == "a.jsonl" else {"columns": columns}
        with open_small(tmp_path / name, tokenizer, cache_dir, pack="none", **how) as dataset:
            found.append(all_tokens(dataset))
            assert dataset.detected.num_trained_tokens < dataset.detected.num_tokens
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question,answer\na,b\n", "data.columns maps these to other names"),
        ("prompt,completion\na,b,c\n", "a.csv:2: 3 cells, but the first row names 2 columns"),
        ("prompt,prompt\na,b\n", "names its columns, each once"),
        ('prompt,completion\na,"b\n', "a.csv:2: not valid CSV"),
    ],
)
def test_tables_that_are_none_are_refused(tmp_path, tokenizer, cache_dir, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        open_small(tmp_path / "a.csv", tokenizer, cache_dir)


def test_malformed_records_are_counted_up_to_a_limit(tmp_path, make, chatml, cache_dir):
    good = json.dumps(RECORDS["messages"][0])
    wrong = json.dumps({"messages": [{"role": "narrator", "content": "a"}]})
    path = tmp_path / "a.jsonl"
    path.write_text(f"{{broken\n{good}\n[1]\n{wrong}\n{good}\n")
    with open_small(path, make(chatml), cache_dir, max_bad_records=3) as dataset:
        assert (dataset.detected.num_documents, dataset.detected.num_bad) == (2, 3)
        text = dataset.describe()
    assert "(left out: 3 malformed records)" in text
    assert f"left out: {path}:1: not valid JSON" in text
    assert "unknown role 'narrator'" in text
    with pytest.raises(DataError, match=r"more than 2 malformed records .*; the last: .*narrator"):
        open_small(path, make(chatml), cache_dir, max_bad_records=2)
    with pytest.raises(DataError, match=r"a.jsonl:1: not valid JSON"):
        open_small(path, make(chatml), cache_dir)


def test_a_conversation_that_the_template_refuses_is_a_malformed_record(tmp_path, make, chatml, cache_dir):
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + chatml
    )
    refused = {"messages": [{"role": "system", "content": "a"}, *RECORDS["messages"][0]["messages"]]}
    path = write_jsonl(tmp_path / "a.jsonl", [refused, *RECORDS["messages"]])
    with open_small(path, make(template), cache_dir, max_bad_records=1) as dataset:
        assert (dataset.detected.num_bad, dataset.detected.num_documents) == (1, len(LINES))


def trained_text(dataset, tokenizer):
    batch = dataset.batch(0, dataset.num_sequences)
    return tokenizer.decode(batch.labels[batch.labels != IGNORED])


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_the_last_reply_alone_is_trained(tmp_path, make, chatml, marked, cache_dir, template):
    """With a template that marks replies, and with one that does not."""
    turns = [("user", "a"), ("assistant", "first"), ("user", "b"), ("assistant", "second")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    tokenizer = make({"chatml": chatml, "marked": marked}[template])
    found = {}
    for train_on in ("replies", "last", "all"):
        with open_small(path, tokenizer, cache_dir, seq_len=128, pack="none", train_on=train_on) as dataset:
            found[train_on] = trained_text(dataset, tokenizer)
    assert "first" in found["replies"]
    assert "second" in found["replies"]
    assert "first" not in found["last"]
    assert found["last"].startswith("second")
    assert found["all"].startswith("<|im_start|>user")


def test_a_template_by_name_or_file(tmp_path, make, chatml, cache_dir):
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS["messages"])
    (tmp_path / "mine.jinja").write_text(chatml)
    plain = make()
    found = {}
    for template in (None, "plain", "chatml", str(tmp_path / "mine.jinja")):
        with open_small(path, plain, cache_dir, template=template) as dataset:
            found[template] = dataset.detected.example, dataset.detected.num_trained_tokens
    assert found[None] == found["plain"]
    assert found["chatml"][0].startswith("<|im_start|>user")
    assert found[str(tmp_path / "mine.jinja")][0].startswith("<|im_start|>user")
    with pytest.raises(ConfigError, match=r"data.template: llama9 is neither a file .* chatml, plain"):
        open_small(path, plain, cache_dir, template="llama9")


def test_cut_documents_are_counted_and_nothing_left_is_refused(tmp_path, tokenizer, cache_dir):
    long = {"prompt": "the quick brown fox jumps over the lazy dog. " * 20, "completion": "yes"}
    short = {"prompt": "fox", "completion": "yes"}
    path = write_jsonl(tmp_path / "a.jsonl", [long, short, long])
    with open_small(path, tokenizer, cache_dir, pack="none") as dataset:
        kept, text = dataset.kept(), dataset.describe()
        batch = dataset.batch(0, 3)
    assert (kept.num_documents, kept.num_cut, kept.num_untrained) == (3, 2, 2)
    assert (kept.num_tokens, kept.num_trained) == (batch.attention_mask.sum(), batch.num_target_tokens)
    assert "2 of 3 documents are cut at data.seq_len=16 tokens" in text
    assert f"of what is left {kept.num_trained / kept.num_tokens:.1%} is trained" in text
    assert "2 documents have nothing left to train" in text
    write_jsonl(path, [long])
    with (
        open_small(path, tokenizer, cache_dir, pack="none") as dataset,
        pytest.raises(
            DataError, match=r"what would be is cut off. 1 of 1 documents are longer than data.seq_len=16"
        ),
    ):
        dataset.kept().check(16)


def several(tmp_path, weights):
    """Three sources of 10, 20 and 30 sequences of 16 tokens, each of tokens of its own."""
    corpora = []
    for i, weight in enumerate(weights):
        tokens = (np.arange(160 * (i + 1)) % 40 + 100 * i).astype("<i4")
        np.save(tmp_path / f"{i}.npy", tokens)
        corpora.append(Corpus(path=tmp_path / f"{i}.npy", weight=weight))
    return open_data(
        corpora, None, seq_len=16, cache_dir=tmp_path, seed=3, limits=ModelLimits(vocab_size=1000)
    )


def test_several_sources_are_mixed_by_their_weights(tmp_path):
    """An epoch has every sequence of a source as often as its weight says; of halves the next epoch has the other."""
    with several(tmp_path, (2, 0.5, 1)) as dataset:
        assert dataset.num_sequences == 20 + 10 + 30
        epochs = [dataset.batch(epoch, 60) for epoch in range(2)]
        assert torch.equal(dataset.batch(0, 20).input_ids, epochs[0].input_ids[:20])
    owners = [(epoch.input_ids[:, 0] // 100).tolist() for epoch in epochs]
    assert [owner.count(i) for owner in owners for i in range(3)] == [20, 10, 30] * 2
    assert owners[0] != sorted(owners[0])


def test_one_source_of_weight_one_is_in_the_order_it_always_was(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(160, dtype="<i4"))
    limits = ModelLimits(vocab_size=1000)
    with (
        open_data(tmp_path / "a.npy", None, seq_len=16, cache_dir=tmp_path, seed=3, limits=limits) as alone,
        open_data(
            [Corpus(path=tmp_path / "a.npy")], None, seq_len=16, cache_dir=tmp_path, seed=3, limits=limits
        ) as listed,
    ):
        assert torch.equal(alone.batch(0, 10).input_ids, listed.batch(0, 10).input_ids)


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_prompts_and_completions_of_messages_are_masked_as_trl_does(
    tmp_path, make, chatml, marked, cache_dir, template
):
    """All that the template writes after the prompt, opened for a reply; with tags, what stands between them."""
    tokenizer = make({"chatml": chatml, "marked": marked}[template])
    prompt = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "not trained"},
        {"role": "user", "content": "b"},
    ]
    completion = [{"role": "assistant", "content": "trained"}]
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": completion}])
    with open_small(path, tokenizer, cache_dir, seq_len=128, pack="none") as dataset:
        batch = dataset.batch(0, 1)
        assert dataset.detected.format == "prompt_completion"
    opened = tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"]
    whole = [*tokenizer.apply_chat_template([*prompt, *completion])["input_ids"], EOS]
    count = int(batch.attention_mask.sum())
    assert batch.input_ids[0, :count].tolist() == whole
    assert batch.labels[0, :count].tolist() == [IGNORED] * len(opened) + whole[len(opened) :]
