import errno
import os
from collections import Counter
from pathlib import Path

import pytest

from crash.faults import APPLICABLE, LANE, Fault, Key, Layer, faults_of, layered
from outsize import files
from outsize.errors import ExecutionError
from outsize.training.run import train
from support import make_run


def replay(layer: Layer, root: Path) -> dict[str, bytes]:
    """The files below ``root`` after all that a layer has seen, made from its log alone."""
    held: dict[str, bytearray] = {}
    for operation in layer.operations:
        name = str(operation.path)
        if operation.kind == "open" and operation.flags & os.O_CREAT:
            if operation.flags & os.O_TRUNC or name not in held:
                held[name] = bytearray()
        elif operation.kind == "pwrite":
            assert operation.data is not None
            at = operation.offset
            held[name].extend(bytes(max(at - len(held[name]), 0)))
            held[name][at : at + operation.moved] = operation.data
        elif operation.kind == "rename":
            before, after = name, str(operation.target)
            moving = [path for path in held if path == before or path.startswith(before + "/")]
            held |= {after + path.removeprefix(before): held.pop(path) for path in moving}
        elif operation.kind in ("unlink", "remove_tree"):
            for path in [path for path in held if path == name or path.startswith(name + "/")]:
                del held[path]
    return {str(Path(path).relative_to(root)): bytes(content) for path, content in held.items()}


def write(path: Path, data: bytes, *, sync: bool = False) -> None:
    with files.open_binary(path, "w", buffered=False) as file:
        done = 0
        while done < len(data):
            done += file.write(data[done:])
        if sync:
            files.system().fsync(file.fileno())


def test_every_kind_of_call_has_its_faults(tmp_path: Path):
    with layered(Layer(tmp_path)) as layer:
        files.make_directories(tmp_path / "a")
        write(tmp_path / "a/x", b"abcd", sync=True)
        files.copy(tmp_path / "a/x", tmp_path / "a/y")
        files.system().rename(tmp_path / "a/y", tmp_path / "a/z")
        files.sync(tmp_path / "a")
        files.system().unlink(tmp_path / "a/z")
        files.system().remove_tree(tmp_path / "a")
    kinds = Counter(operation.kind for operation in layer.operations)
    assert kinds == {
        "mkdir": 1,
        "open": 4,
        "pwrite": 2,
        "pread": 3,  # the last finds the end
        "fsync": 2,
        "close": 4,
        "rename": 1,
        "unlink": 1,
        "remove_tree": 1,
    }
    assert [operation.ended for operation in layer.operations] == sorted(o.ended for o in layer.operations)
    assert all(operation.begun < operation.ended for operation in layer.operations)
    assert all(faults_of(operation) for operation in layer.operations)
    assert set(kinds) <= set(APPLICABLE)


@pytest.mark.parametrize(("fault", "number"), [(Fault.EIO, errno.EIO), (Fault.ENOSPC, errno.ENOSPC)])
def test_a_call_fails_and_does_nothing(tmp_path: Path, fault: Fault, number: int):
    key = Key("pwrite", "x", 0, 4, 0)
    with (
        layered(Layer(tmp_path, {key: fault})) as layer,
        pytest.raises(OSError, match=os.strerror(number)) as caught,
    ):
        write(tmp_path / "x", b"abcd")
    assert caught.value.errno == number
    assert (tmp_path / "x").read_bytes() == b""
    assert [operation.key for operation in layer.sprung] == [key]
    assert [o.error for o in layer.operations if o.kind == "pwrite"] == [number]


def test_an_operation_can_be_named_by_its_number(tmp_path: Path):
    with layered(Layer(tmp_path, {1: Fault.EIO})), pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "x", b"abcd")


def test_a_torn_write_leaves_half_and_a_short_one_says_so(tmp_path: Path):
    key = Key("pwrite", "x", 0, 8, 0)
    with layered(Layer(tmp_path, {key: Fault.TORN})), pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "x", b"abcdefgh")
    assert (tmp_path / "x").read_bytes() == b"abcd"
    with layered(Layer(tmp_path, {key: Fault.SHORT})):
        write(tmp_path / "x", b"abcdefgh")
    assert (tmp_path / "x").read_bytes() == b"abcdefgh"


def test_a_short_read_hands_out_half_and_a_flip_one_bit(tmp_path: Path):
    (tmp_path / "x").write_bytes(bytes(100))
    with layered(Layer(tmp_path, {1: Fault.SHORT})), files.open_binary(tmp_path / "x", "r") as file:
        assert file.read() == bytes(100)
    with layered(Layer(tmp_path, {1: Fault.FLIP})), files.open_binary(tmp_path / "x", "r") as file:
        assert sum(bin(byte).count("1") for byte in file.read()) == 1


def test_a_lost_sync_looks_like_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with layered(Layer(tmp_path, {Key("fsync", "x", 0, 0, 0): Fault.LOST})):
        write(tmp_path / "x", b"a", sync=True)
        assert synced == []
        write(tmp_path / "x", b"a", sync=True)
    assert len(synced) == 1


def test_the_layer_is_gone_afterwards(tmp_path: Path):
    before = files.system()
    seen = []

    def fail() -> None:
        seen.append(files.system())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), layered(Layer(tmp_path)) as layer:
        fail()
    assert seen == [layer]
    assert files.system() is before


def test_a_run_is_seen_whole(tmp_path: Path):
    """Its log alone makes every file that it left, but for those that libraries write."""
    config = make_run(tmp_path, train={"steps": 2})
    with layered(Layer(tmp_path, keep_data=True)) as layer:
        train(config)
    made = replay(layer, tmp_path)
    run = tmp_path / "run"
    left = {str(p.relative_to(tmp_path)): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert {name for name in left if name not in made} == set()
    assert {name: made[name] for name in left} == left
    ops = [operation for operation in layer.operations if operation.kind == LANE]
    assert {operation.key.offset for operation in ops} == {0, 1}
    assert keys(layer) == keys_of_another(config, tmp_path)


def keys_of_another(config: object, root: Path) -> set[Key]:
    files.system().remove_tree(root / "run")
    with layered(Layer(root)) as layer:
        train(config)  # type: ignore[arg-type]
    return keys(layer)


def keys(layer: Layer) -> set[Key]:
    return {operation.key for operation in layer.operations}


def test_a_lane_raises(tmp_path: Path):
    config = make_run(tmp_path, train={"steps": 2})
    fault = {Key(LANE, "B 1.0@w0", 1, 0, 0): Fault.EXCEPTION}
    with layered(Layer(tmp_path, fault)), pytest.raises(ExecutionError, match=r"B 1.0@w0 .*injected"):
        train(config)
