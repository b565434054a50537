import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from outsize import files
from outsize.checkpoint.files import checkpoint_format
from outsize.checkpoint.files.checkpoint_format import (
    DTYPES,
    bytes_of,
    read_elements,
    read_header,
    read_tensor,
    sum_of_file,
    write_file,
)
from outsize.errors import CheckpointError


def some_tensors() -> dict[str, torch.Tensor]:
    bits = torch.randint(0, 2, (3, 8), generator=torch.Generator().manual_seed(0))
    tensors = {f"of.{name}": bits.to(dtype) for name, dtype in DTYPES.items()}
    return tensors | {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "odd": torch.arange(7).bfloat16(),
    }


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape)
        assert bytes_of(tensor) == bytes_of(theirs[name])


def test_a_large_file_is_synced_on_its_way_and_says_that_it_gets_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"a": torch.arange(40.0), "b": torch.arange(30.0)}
    plain = write_file(tmp_path / "plain", tensors)
    synced: list[int] = []

    class Counting(files.System):
        def fdatasync(self, descriptor: int) -> None:
            synced.append(descriptor)
            super().fdatasync(descriptor)

    monkeypatch.setattr(checkpoint_format, "_STAGING_BYTES", 16)
    monkeypatch.setattr(checkpoint_format, "_SYNC_BYTES", 100)
    moved: list[None] = []
    with files.replaced(Counting()):
        assert write_file(tmp_path / "often", tensors, lambda: moved.append(None)) == plain
    assert len(synced) >= 2
    assert len(moved) >= len(synced) + 280 // 16 + 1
    assert (tmp_path / "often").read_bytes() == (tmp_path / "plain").read_bytes()


def test_what_the_library_writes_is_read(tmp_path: Path):
    tensors = some_tensors()
    safetensors.torch.save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    stored = read_header(tmp_path / "a.safetensors")
    assert_same({name: read_tensor(entry) for name, entry in stored.items()}, tensors)


def test_what_is_written_the_library_reads(tmp_path: Path):
    tensors = some_tensors() | {"view": torch.arange(12.0).view(3, 4).t()}
    path = tmp_path / "a.safetensors"
    assert write_file(path, tensors) == sum_of_file(path)
    assert sum_of_file(path).num_bytes == path.stat().st_size
    expected = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert_same(safetensors.torch.load_file(path), expected)


@given(
    start=st.integers(0, 1000),
    length=st.integers(0, 1000),
    stored_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    into_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_stretch_of_elements_is_read_and_cast(tmp_path_factory, start, length, stored_dtype, into_dtype):
    tensor = torch.linspace(-3, 3, 1000).view(10, 100).to(stored_dtype)
    path = tmp_path_factory.mktemp("stretch") / "a.safetensors"
    write_file(path, {"first": torch.ones(3), "t": tensor})
    stop = min(1000, start + length)
    into = torch.full((stop - start,), 7.0, dtype=into_dtype)
    read_elements(read_header(path)["t"], start, stop, into)
    assert torch.equal(into, tensor.view(-1)[start:stop].to(into_dtype))


def test_a_cast_passes_through_a_small_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint_format, "_STAGING_BYTES", 60)
    sizes: list[int] = []
    fill = checkpoint_format._read_exactly

    def spy(fd: int, offset: int, into: memoryview, path: Path) -> None:
        sizes.append(len(into))
        fill(fd, offset, into, path)

    monkeypatch.setattr(checkpoint_format, "_read_exactly", spy)
    tensor = torch.arange(100.0)
    write_file(tmp_path / "a", {"t": tensor})
    into = torch.empty(97, dtype=torch.bfloat16)
    read_elements(read_header(tmp_path / "a")["t"], 3, 100, into)
    assert torch.equal(into, tensor[3:].bfloat16())
    assert sizes == [60] * 6 + [28]


@pytest.mark.parametrize(("start", "stop", "room"), [(0, 11, 11), (-1, 3, 4), (4, 2, 0), (0, 5, 4)])
def test_a_stretch_that_does_not_fit_is_a_mistake_of_the_caller(
    tmp_path: Path, start: int, stop: int, room: int
):
    write_file(tmp_path / "a", {"t": torch.zeros(10)})
    with pytest.raises(ValueError, match="do not fit"):
        read_elements(read_header(tmp_path / "a")["t"], start, stop, torch.zeros(room))


@pytest.mark.parametrize("keep", [0, 7, 8, 40, -1, -100])
def test_a_truncated_file_is_found_by_its_header(tmp_path: Path, keep: int):
    path = tmp_path / "a.safetensors"
    write_file(path, {"t": torch.zeros(100), "u": torch.zeros(3)})
    path.write_bytes(path.read_bytes()[: keep if keep >= 0 else path.stat().st_size + keep])
    with pytest.raises(CheckpointError, match=r"a\.safetensors is truncated .*download it again"):
        read_header(path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path):
    path = tmp_path / "a"
    write_file(path, {"t": torch.zeros(100)})
    stored = read_header(path)["t"]
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="it ended at byte"):
        read_elements(stored, 0, 100, torch.zeros(100))
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_elements(stored, 0, 100, torch.zeros(100))


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="a is missing"):
        read_header(tmp_path / "a")


def with_header(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "said to have 4 bytes"),
        ({"dtype": "F32", "shape": [1]}, "entry for t is not valid"),
        ({"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}, "stored as F4, which cannot be trained"),
        (7, "entry for t is not valid"),
    ],
)
def test_a_header_that_makes_no_sense_is_an_error(tmp_path: Path, entry, reason: str):
    with pytest.raises(CheckpointError, match=reason):
        read_header(with_header(tmp_path / "a", json.dumps({"t": entry}).encode(), bytes(4)))


@pytest.mark.parametrize("header", [b"{nonsense}", b"[1, 2]", b"\xff\xfe\xfd"])
def test_a_header_that_is_not_a_json_object_is_an_error(tmp_path: Path, header: bytes):
    with pytest.raises(CheckpointError, match="its header is not JSON"):
        read_header(with_header(tmp_path / "a", header))


def test_an_existing_file_is_not_overwritten(tmp_path: Path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", {"t": torch.zeros(3)})
    assert (tmp_path / "a").read_text() == "mine"
