from pathlib import Path
from types import SimpleNamespace

import pytest

from outsize.checkpoint import home_file as module
from outsize.errors import StorageError
from outsize.storage.directory import Zram

ZRAM = Zram(
    name="zram0",
    num_bytes=2**30,
    algorithm="lz4",
    algorithms=("lzo", "lz4"),
    original_bytes=2**21,
    memory_bytes=2**20,
    limit_bytes=0,
)


def told(home, below, monkeypatch):
    prepared = SimpleNamespace(
        machine=SimpleNamespace(home=home), config=SimpleNamespace(memory=SimpleNamespace(store_dir=None))
    )
    said: list[str] = []
    monkeypatch.setattr(module, "zram_below", below)
    module.tell_costs(prepared, Path("run"), said.append)
    return said


def test_what_a_home_on_zram_takes_is_said(monkeypatch: pytest.MonkeyPatch):
    assert told("disk", lambda _: ZRAM, monkeypatch) == [
        "the home lies in RAM, which no budget counts: zram0 (lz4) holds 2.00 MiB in 1.00 MiB of RAM, 2.00:1"
    ]


def test_of_other_homes_nothing_is_said(monkeypatch: pytest.MonkeyPatch):
    def silent(_):
        raise StorageError("no word")

    assert told("disk", lambda _: None, monkeypatch) == []
    assert told("host", lambda _: ZRAM, monkeypatch) == []
    assert told("disk", silent, monkeypatch) == []
