"""What is kept for the user between commands: whole or absent, never wrong, and not without end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from counting import counted
from outsize import user_cache
from outsize.config import parse_config
from outsize.runtime.trial.counts import dump, parse
from outsize.session.job import known_models, model_setup

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 96,
}
RUN = {
    "model": {"path": "unused", "dtype": "fp32"},
    "data": {"path": "unused", "seq_len": 64},
    "train": {"tokens_per_step": 64},
}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outsize" / "x"


def test_an_entry_is_found_again(place):
    assert user_cache.load("x", "one") is None
    user_cache.store("x", "one", b"content\nof two lines")
    assert user_cache.load("x", "one") == b"content\nof two lines"
    assert [file.name for file in place.iterdir()] == ["one.json"]


@pytest.mark.parametrize("named", ["", "relative/place"])
def test_the_directory_is_that_of_the_user_unless_an_absolute_one_is_named(named, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache.cache_directory() == tmp_path / ".cache" / "outsize"


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def not_text(file: Path) -> None:
    file.write_bytes(b"\xff" * 100)


def a_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to(file.with_name("elsewhere"))


def too_large(file: Path) -> None:
    os.truncate(file, user_cache.MOST_BYTES + 1)


@pytest.mark.parametrize(
    "broken",
    [cut, flipped, emptied, not_text, a_directory, a_pipe, a_link, too_large],
    ids=lambda f: f.__name__,
)
def test_what_is_broken_counts_as_absent(place, broken):
    user_cache.store("x", "one", b"content")
    broken(place / "one.json")
    assert user_cache.load("x", "one") is None
    user_cache.store("x", "one", b"other")  # or cannot be kept, and that is all


def test_a_place_that_cannot_be_written_costs_nothing_but_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    user_cache.store("x", "one", b"content")
    assert user_cache.load("x", "one") is None


def test_the_entries_that_were_used_last_stay(place, monkeypatch):
    monkeypatch.setattr(user_cache, "MOST_ENTRIES", 3)
    for number, name in enumerate("abcd"):
        user_cache.store("x", name, b"")
        os.utime(place / f"{name}.json", (number, number)) if name != "d" else None
        if name == "c":
            assert user_cache.load("x", "a") is not None  # used
    assert sorted(file.stem for file in place.iterdir()) == ["a", "c", "d"]


def test_digests_follow_content_and_source(tmp_path, monkeypatch):
    assert user_cache.digest_of({"a": 1, "b": 2}) == user_cache.digest_of({"b": 2, "a": 1})
    assert user_cache.digest_of({"a": 1}) != user_cache.digest_of({"a": 2})
    room = tmp_path / "room"
    room.mkdir()
    (room / "one.py").write_text("1")
    monkeypatch.setattr(user_cache, "__file__", str(tmp_path / "user_cache.py"))
    before = user_cache.source_digest("room")
    (room / "one.py").write_text("2")
    assert user_cache.source_digest("room") != before


def test_a_model_is_counted_once(monkeypatch):
    counts = []
    plain = model_setup.count_model
    monkeypatch.setattr(model_setup, "count_model", lambda *args: counts.append(1) or plain(*args))
    first = known_models.counted(LLAMA, parse_config(RUN))
    assert known_models.counted(dict(reversed(LLAMA.items())), parse_config(RUN)) == first
    assert len(counts) == 1
    other = {**RUN, "model": {"path": "unused", "dtype": "bf16"}}
    assert known_models.counted(LLAMA, parse_config(other)) != first
    elsewhere = {**RUN, "model": {"path": "elsewhere", "dtype": "fp32"}, "optimizer": {"lr": 1.0}}
    assert known_models.counted(LLAMA, parse_config(elsewhere)) == first
    assert len(counts) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda content: {},
        lambda content: {**content, "lengths": []},
        lambda content: {**content, "form_of": [10**6]},
        lambda content: {**content, "form_of": content["form_of"][:1]},
        lambda content: {**content, "forms": []},
        lambda content: {**content, "passes": content["passes"][:1]},
        lambda content: {**content, "lengths": [64, 64, 64]},
        lambda content: {**content, "chunk_tokens": "many"},
        lambda content: [[[[[]]]]],
    ],
)
def test_counts_that_somebody_else_has_written_are_counted_again(change, tmp_path):
    """With a digest that is right, so that they are read."""
    counts = known_models.counted(LLAMA, parse_config(RUN))
    directory = tmp_path / "outsize" / "counts"
    (file,) = directory.iterdir()
    content = json.dumps(change(json.loads(file.read_bytes().partition(b"\n")[2]))).encode()
    user_cache.store("counts", file.stem, content)
    with pytest.raises(ValueError):  # noqa: PT011 - whichever it is
        parse(content)
    assert known_models.counted(LLAMA, parse_config(RUN)) == counts


def test_counts_are_the_same_from_json():
    for settings in ({}, {"lora": {"r": 4}}, {"mlp_parts": 2}):
        counts = counted(LLAMA, **settings)
        again = parse(dump(counts))
        assert again == counts
        assert again.workload(3, 512) == counts.workload(3, 512)


def test_a_question_of_a_known_model_imports_no_torch(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA, "max_position_embeddings": 2048}))
    code = (
        "import sys; from outsize.cli import main\n"
        f"sys.argv = ['outsize', 'plan', {str(file)!r}, '--gpus', '4090', '--no-advice', '--seq-len', '64']\n"
        "try: main()\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print('torch' in sys.modules)"
    )
    found = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [text.splitlines()[-1] for text in found] == ["True", "False"]
    assert found[0].splitlines()[:-1] == found[1].splitlines()[:-1]
