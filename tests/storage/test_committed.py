"""A home that commits: what is committed stays whole, whatever is written beside it and wherever it is cut off."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts import pattern, same_values, small_model
from contracts.home_contract import planes_for
from optim.reference import ADAFACTOR
from outsize import files
from outsize.errors import StorageError
from outsize.model.sizes.model_spec import (
    GRANULE_ELEMENTS,
    PLANE_ELEMENTS,
    ModelSpec,
    granule_elements_for,
    pack_unit,
)
from outsize.optim.optimizer_spec import GRADIENT, StateLayout
from outsize.optim.shares import commit_record_bytes, committed_bytes
from outsize.storage import record as record_module
from outsize.storage.committed import CommittedHome, find_record
from outsize.storage.home_layout import ITEM_DTYPE
from outsize.storage.ledger import Arena, Ledger
from outsize.storage.prealloc import IOPool

Planes = dict[tuple[int, str], Tensor]
MODEL = small_model("bf16")


class Place:
    """Makes homes of one model at one path."""

    def __init__(self, path: Path, pool: IOPool, arena: Arena) -> None:
        self.path, self.pool, self.arena = path, pool, arena

    def make(self, granule_elements: int = PLANE_ELEMENTS, model: ModelSpec = MODEL) -> CommittedHome:
        return CommittedHome(
            model,
            planes_for(model.dtype),
            self.path,
            self.pool,
            arena=self.arena,
            granule_elements=granule_elements,
        )

    def open(self, granule_elements: int = PLANE_ELEMENTS, model: ModelSpec = MODEL) -> CommittedHome:
        record, _ = find_record(self.path, model)
        assert record is not None
        return CommittedHome(
            model,
            planes_for(model.dtype),
            self.path,
            self.pool,
            arena=self.arena,
            granule_elements=granule_elements,
            record=record,
        )

    def borrow(self, num_bytes: int) -> Tensor:
        return self.arena.take(num_bytes, "borrowed")

    def write_all(self, home: CommittedHome, seed: int, model: ModelSpec = MODEL) -> Planes:
        """Write every plane that a step changes, and return what was written."""
        written: Planes = {}
        for unit in model.units:
            for plane in StateLayout(dtype=model.dtype).write_planes if unit.trainable else ():
                dtype = torch.bfloat16 if plane == "weights" and model.dtype == "bf16" else torch.float32
                key = (unit.index, plane)
                written[key] = pattern(unit.numel, dtype, seed * 100 + len(written), self.arena)
                home.write(unit.index, plane, 0, written[key])
        return written

    def holds(self, home: CommittedHome, planes: Planes) -> bool:
        return all(
            same_values(self.read(home, unit, plane, source), source)
            for (unit, plane), source in planes.items()
        )

    def read(self, home: CommittedHome, unit: int, plane: str, like: Tensor) -> Tensor:
        into = self.arena.take(like.nbytes, "into").view(like.dtype)
        home.read(unit, plane, 0, into)
        return into


@pytest.fixture
def place(tmp_path: Path, pool: IOPool, arena: Arena) -> Place:
    return Place(tmp_path / "home.bin", pool, arena)


def test_what_was_committed_is_what_is_found_again(place: Place):
    with place.make() as home:
        committed = place.write_all(home, 1)
        frozen = pattern(MODEL.units[2].numel, torch.bfloat16, 7, place.arena)
        home.write(2, "weights", 0, frozen)
        home.commit({"step": 1})
        newer = place.write_all(home, 2)
        assert place.holds(home, newer)  # within the process the newest is seen
    with place.open() as home:
        assert home.record is not None
        assert home.record.state == {"step": 1}
        assert place.holds(home, {**committed, (2, "weights"): frozen})


def test_steps_follow_one_another_on_two_sides(place: Place):
    home = place.make()
    for step in range(1, 6):
        written = place.write_all(home, step)
        home.commit({"step": step})
        home.close()
        home = place.open()
        assert place.holds(home, written)
        place.write_all(home, 99)  # a step that is never committed
        home.close()
        home = place.open()
        home.check(place.borrow)
        assert place.holds(home, written)
    home.close()


def test_a_step_that_writes_nothing_commits_what_there_is(place: Place):
    with place.make() as home:
        written = place.write_all(home, 1)
        home.commit({"step": 1})
        home.commit({"step": 2})
    with place.open() as home:
        assert home.record is not None
        assert home.record.state == {"step": 2}
        assert place.holds(home, written)


def test_a_part_of_a_plane_may_be_written_alone(place: Place):
    with place.make() as home:
        written = place.write_all(home, 1)
        home.commit({"step": 1})
        part = pattern(PLANE_ELEMENTS, torch.float32, 50, place.arena)
        home.write(0, "exp_avg", PLANE_ELEMENTS, part)
        home.write(0, "exp_avg", PLANE_ELEMENTS, part)  # again, before the commit
        home.commit({"step": 2})
    with place.open() as home:
        whole = place.read(home, 0, "exp_avg", written[0, "exp_avg"])
        assert same_values(whole[PLANE_ELEMENTS : 2 * PLANE_ELEMENTS], part)
        assert same_values(whole[:PLANE_ELEMENTS], written[0, "exp_avg"][:PLANE_ELEMENTS])


def test_before_the_first_commit_there_is_nothing(place: Place):
    with place.make() as home:
        place.write_all(home, 1)
    assert find_record(place.path, MODEL) == (None, "")
    with place.make() as home:
        home.commit({"step": 1})
    with place.make():  # made anew: what was committed is gone
        assert find_record(place.path, MODEL) == (None, "")


def test_the_file_is_as_large_as_the_plan_says(place: Place):
    planned = 2 * commit_record_bytes(MODEL) + sum(committed_bytes(unit, "bf16") for unit in MODEL.units)
    with place.make():
        assert place.path.stat().st_size == planned


def test_a_record_has_room_for_the_names_of_a_deep_model(place: Place):
    """Long names of many parameters, each with the count of its updates; and a step of a run that has gone on long."""
    names = [f"model.layers.{i}.self_attn.\u00e9_proj_{j}.weight" for i in range(90) for j in range(10)]
    model = ModelSpec(
        dtype="bf16",
        units=tuple(
            pack_unit(i, f"u{i}", "block", [(name, (8,), True, True) for name in names[10 * i : 10 * i + 10]])
            for i in range(90)
        ),
    )
    state = {"step": 10**9, "updates": dict.fromkeys(names, 10**9), "text": "x" * 12_000}
    with place.make(GRANULE_ELEMENTS, model) as home:
        home.commit(state)
    record, _ = find_record(place.path, model)
    assert record is not None
    assert record.state == state


def test_granules_follow_tiles():
    assert granule_elements_for(0) == GRANULE_ELEMENTS
    assert granule_elements_for(2**20) == GRANULE_ELEMENTS
    assert granule_elements_for(3 * 2048) == 2048
    assert granule_elements_for(65_536 * 3) == 65_536


LARGE = ModelSpec(
    dtype="fp32", units=(pack_unit(0, "block", "block", [("w", (3 * GRANULE_ELEMENTS + 5000,), True, True)]),)
)


@pytest.mark.parametrize(("first", "then"), [(65_536, 4096), (4096, 65_536), (65_536, 65_536)])
def test_another_tile_size_goes_on_from_the_same_home(place: Place, first: int, then: int):
    with place.make(first, LARGE) as home:
        place.write_all(home, 1, LARGE)
        home.commit({"step": 1})
        written = place.write_all(home, 2, LARGE)
        home.commit({"step": 2})
    with place.open(then, LARGE) as home:
        home.check(place.borrow)
        tile = min(first, then)
        part = pattern(tile, torch.float32, 50, place.arena)
        assert home.granule_elements == tile
        home.write(0, "exp_avg", tile, part)
        home.commit({"step": 3})
        expected = written[0, "exp_avg"].clone()
        expected[tile : 2 * tile] = part
        assert same_values(place.read(home, 0, "exp_avg", expected), expected)
        assert place.holds(home, {k: v for k, v in written.items() if k[1] != "exp_avg"})


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_flipped_bit_is_an_error_that_says_where(place: Place):
    with place.make() as home:
        place.write_all(home, 1)
        home.commit({"step": 1})
        written = place.write_all(home, 2)
        home.commit({"step": 2})
        granules = home._granules[0, "exp_avg"]
        flip(place.path, granules.offset(int(granules.newest[1]), 1) + 17)
        match = r"unit embed, plane exp_avg, elements 2048 to 4096 are not what was written.*step 2, the last"
        with pytest.raises(StorageError, match=match):
            place.read(home, 0, "exp_avg", written[0, "exp_avg"])
        other = written[0, "exp_avg_sq"]
        assert same_values(place.read(home, 0, "exp_avg_sq", other), other)
    with place.open() as home, pytest.raises(StorageError, match="embed, plane exp_avg"):
        home.check(place.borrow)


def test_a_flipped_bit_in_what_is_not_committed_harms_no_commit(place: Place):
    with place.make() as home:
        home.commit({"step": 3})
        written = place.write_all(home, 1)
        home.write(0, GRADIENT, 0, written[0, "master"])
        for plane in (GRADIENT, "exp_avg"):
            granules = home._granules[0, plane]
            flip(place.path, granules.offset(int(granules.newest[0]), 0))
            with pytest.raises(StorageError, match=f"plane {plane}.*Step 3, the last committed one, is good"):
                place.read(home, 0, plane, written[0, "master"])


@pytest.mark.parametrize("kept", [0, 1, 10, 60, 200, 9000])
def test_a_torn_commit_leaves_the_one_before(place: Place, kept: int):
    """Of the second record only the first ``kept`` bytes reached the disk."""
    with place.make() as home:
        written = place.write_all(home, 1)
        home.commit({"step": 1})
        slot = commit_record_bytes(MODEL)  # the next one goes there
        before = place.path.read_bytes()
        place.write_all(home, 2)
        home.commit({"step": 2})
    data = bytearray(place.path.read_bytes())
    size = commit_record_bytes(MODEL)
    data[slot + kept : slot + size] = before[slot + kept : slot + size]
    place.path.write_bytes(data)
    record, wrong = find_record(place.path, MODEL)
    assert record is not None
    if record.state == {"step": 2}:
        assert kept == 9000  # the record was shorter than that
        return
    assert record.state == {"step": 1}
    assert bool(wrong) == (kept > 0)
    with place.open() as home:
        home.check(place.borrow)
        assert place.holds(home, written)


def test_a_home_of_another_model_is_refused(place: Place):
    with place.make() as home:
        home.commit({"step": 1})
    other = small_model("fp32")
    record, _ = find_record(place.path, MODEL)
    with pytest.raises(StorageError, match=r"another model|has \d+ bytes, not"):
        CommittedHome(other, planes_for("fp32"), place.path, place.pool, arena=place.arena, record=record)


def test_a_truncated_home_is_not_taken(place: Place):
    with place.make() as home:
        home.commit({"step": 1})
    os.truncate(place.path, place.path.stat().st_size - 4096)
    assert find_record(place.path, MODEL) == (None, f"{place.path} is truncated")


def test_a_home_of_another_format_says_so(place: Place):
    with place.make() as home:
        home.commit({"step": 1})
    with place.path.open("r+b") as file:
        file.seek(8)
        file.write(bytes([9]))
    with pytest.raises(StorageError, match=r"a home of format 9, and this version of outsize knows 1"):
        find_record(place.path, MODEL)


def test_a_record_names_its_hash(place: Place, monkeypatch: pytest.MonkeyPatch):
    """One that names none is of before there was a choice; one that names another is refused, not taken for damage."""
    with place.make() as home:
        written = place.write_all(home, 1)
        home.commit({"step": 1})
        monkeypatch.setattr(record_module, "HASH", "crc32c")
        home.commit({"step": 2})
        monkeypatch.undo()
        with pytest.raises(
            StorageError, match="its checksums are 'crc32c', and this version of outsize knows xxh3_64"
        ):
            find_record(place.path, MODEL)
        monkeypatch.setattr(record_module.json, "dumps", dumps_without_hash)
        home.commit({"step": 3})
        home.commit({"step": 4})
        monkeypatch.undo()
    assert b'"hash"' not in place.path.read_bytes()[: 2 * commit_record_bytes(MODEL)]
    with place.open() as home:
        assert home.record is not None
        assert home.record.state == {"step": 4}
        home.check(place.borrow)
        assert place.holds(home, written)


def dumps_without_hash(head: dict[str, object], **how: Any) -> str:
    return json.JSONEncoder(**how).encode({key: value for key, value in head.items() if key != "hash"})


class FailingSyncs(files.System):
    def fdatasync(self, descriptor: int) -> None:
        raise OSError(5, "Input/output error")


def test_a_failed_sync_is_no_commit(place: Place):
    with place.make() as home:
        written = place.write_all(home, 1)
        home.commit({"step": 1})
        place.write_all(home, 2)
        with files.replaced(FailingSyncs()), pytest.raises(StorageError, match=r"make .* durable"):
            home.commit({"step": 2})
    with place.open() as home:
        assert home.record is not None
        assert home.record.state == {"step": 1}
        assert place.holds(home, written)


def test_two_processes_do_not_share_a_home(place: Place):
    with place.make() as home:
        home.commit({"step": 1})
        with pytest.raises(StorageError, match="in use by another run"):
            place.open()


def test_everything_is_reserved_and_given_back(place: Place):
    size = 2 * commit_record_bytes(MODEL) + sum(committed_bytes(unit, "bf16") for unit in MODEL.units)
    buffer = commit_record_bytes(MODEL, 4096)
    ledger = Ledger({"disk": size, "host": buffer})
    with (
        Arena(ledger=ledger) as arena,
        CommittedHome(
            MODEL,
            planes_for("bf16"),
            place.path,
            place.pool,
            arena=arena,
            granule_elements=4096,
        ),
    ):
        assert (ledger.used("disk"), ledger.used("host")) == (size, buffer)
    assert (ledger.used("disk"), ledger.used("host")) == (0, 0)


def test_a_temporary_home_commits_and_leaves_nothing(place: Place, tmp_path: Path):
    home = CommittedHome(MODEL, planes_for("bf16"), place.path, place.pool, arena=place.arena, temporary=True)
    with home:
        written = place.write_all(home, 1)
        home.commit({"step": 1})
        newer = place.write_all(home, 2)
        assert place.holds(home, newer)
        assert not place.holds(home, written)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("granule_elements", [PLANE_ELEMENTS, GRANULE_ELEMENTS])
def test_planes_of_groups_and_factors_are_committed_and_found_again(granule_elements: int, place: Place):
    """Codes, exponents, ties, rows and columns: whole sectors, whatever a unit's size, checked like any other plane."""
    for state in (
        StateLayout(dtype="bf16", masters="split", moments="int8"),
        StateLayout(dtype="bf16", masters="split"),
        StateLayout(dtype="bf16", masters="split", num_moments=0, state_of=ADAFACTOR, temporaries=3),
    ):
        home = CommittedHome(
            MODEL, state.planes, place.path, place.pool, arena=place.arena, granule_elements=granule_elements
        )
        written = {}
        for unit in MODEL.units:
            for name, plane in state.planes.items() if unit.trainable else ():
                numel, dtype = plane.items_of(unit), ITEM_DTYPE[plane.item]
                numbers = place.arena.take(numel * dtype.itemsize, name)
                numbers.copy_(torch.arange(len(numbers)) * 7 + len(written))
                written[unit.index, name] = numbers.view(dtype)
                home.write(unit.index, name, 0, written[unit.index, name])
        home.commit({"step": 1})
        home.close()
        record, wrong = find_record(place.path, MODEL, state.planes)
        assert record is not None
        assert not wrong
        with CommittedHome(
            MODEL,
            state.planes,
            place.path,
            place.pool,
            arena=place.arena,
            granule_elements=granule_elements,
            record=record,
        ) as again:
            again.check(place.borrow)
            assert place.holds(again, {key: plane for key, plane in written.items() if key[1] != GRADIENT})
        place.path.unlink()
