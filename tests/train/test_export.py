import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import peft
import pytest
import torch
from huggingface_hub import RepoUrl
from huggingface_hub.errors import LocalTokenNotFoundError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id
from transformers import AutoModelForCausalLM, AutoTokenizer

import outsize
from cli.command_line import status_of
from crash.faults import Fault, Key, Layer, layered
from outsize import files
from outsize.checkpoint.checkpoint_state import latest
from outsize.checkpoint.export import Hub, _is_on_the_hub
from outsize.checkpoint.files.checkpoint_shards import join_shards
from outsize.checkpoint.files.checkpoint_writer import new_directory
from outsize.errors import CheckpointError, ConfigError, StorageError
from outsize.functions import export
from outsize.storage.prealloc import preallocate
from outsize.training.run import train
from outsize.training.run_dir import claimed
from outsize.wrapped.module import runner_of
from support import make_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    train(make_run(directory, train={"steps": 2}))
    return directory / "run"


def test_an_export_is_a_model_directory_and_nothing_else(run_dir: Path, tmp_path: Path):
    out = export(run_dir, tmp_path / "out")
    assert out == tmp_path / "out"
    ours = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    theirs = dict(AutoModelForCausalLM.from_pretrained(latest(run_dir)).named_parameters())
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.items())
    assert AutoTokenizer.from_pretrained(out)("abc")["input_ids"]
    assert not {"optimizer", "trainer_state.json"} & {path.name for path in out.iterdir()}


def test_an_empty_directory_may_be_the_target(run_dir: Path, tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert (export(str(run_dir), str(tmp_path / "out")) / "config.json").is_file()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_nothing_is_overwritten(kind: str, run_dir: Path, tmp_path: Path):
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").touch()
    with pytest.raises(StorageError, match="exists already"):
        export(run_dir, out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["model-00002-of-*.safetensors", "config.json", "tokenizer.json"])
def test_what_is_not_as_it_was_saved_is_not_exported(name: str, run_dir: Path, tmp_path: Path):
    copy = shutil.copytree(run_dir, tmp_path / "run")
    (copy / "checkpoints/latest").unlink()  # what nothing names is found by its own name
    newest = latest(copy)
    assert newest is not None
    (path,) = newest.glob(name)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b" ")
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
        export(copy, tmp_path / "out")
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name} is missing"):
        export(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_without_a_run_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        export(tmp_path, tmp_path / "out")


def test_an_export_that_fails_leaves_nothing(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(source: Path, target: Path) -> None:
        target.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("outsize.files.copy", broken)
    with pytest.raises(StorageError, match="the disk is full"):
        export(run_dir, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_export_has_left_goes_with_the_next_and_what_another_writes_stays(
    run_dir: Path, tmp_path: Path
):
    for name in ("killed", "writing"):
        (tmp_path / f".out.partial-{name}").mkdir()
    descriptor = os.open(tmp_path / ".out.partial-writing", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        export(run_dir, tmp_path / "out")
    finally:
        os.close(descriptor)
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.partial-writing"}


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_an_export_on_a_file_system_without_locks_removes_nothing_of_others_and_tells_so_once(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / ".out.partial-writing").mkdir()
    files._tell_of_no_locks.cache_clear()
    for _ in range(2):
        with new_directory(tmp_path / "out", 0, overwrite=True):
            pass
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.partial-writing"}
    assert caplog.text.count("no locks on this file system") == 1


@pytest.mark.parametrize("kind", ["directory", "file"])
@pytest.mark.parametrize("has_new", [False, True])
def test_what_a_killed_export_has_set_aside_comes_back_unless_the_new_one_was_there(
    kind: str, has_new: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    out, former = tmp_path / "out", tmp_path / ".out.former-0123"
    if kind == "directory":
        former.mkdir()
    (former / "weights" if kind == "directory" else former).write_text("former")
    (tmp_path / ".out.partial-0123").mkdir()
    if has_new:
        (tmp_path / ".out.partial-0123").rename(out)
        (out / "weights").write_text("new")
    with pytest.raises(StorageError, match="exists already"), new_directory(out, 0):
        pass
    assert not former.exists()
    assert (out / "weights" if out.is_dir() else out).read_text() == ("new" if has_new else "former")
    assert ("a process was killed while it replaced it" in caplog.text) == (not has_new)
    with new_directory(out, 0, overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_another_export_has_set_aside_stays_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    former, partial = tmp_path / ".out.former-0123", tmp_path / ".out.partial-0123"
    former.mkdir()
    partial.mkdir()
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with new_directory(tmp_path / "out", 0):
            pass
    finally:
        os.close(descriptor)
    assert former.exists()
    assert "rename it to have it back" in caplog.text


def test_a_directory_that_another_export_takes_for_abandoned_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, seen = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append(place)
        if len(seen) == 1:  # the other one has removed it
            place.rmdir()
        if len(seen) == 2:  # the other one is about to
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        plain(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with new_directory(tmp_path / "out", 0) as partial:
        assert partial == seen[2]
        assert partial.is_dir()
    assert len(set(seen[:3])) == 3


@pytest.mark.parametrize("number", [errno.EIO, errno.EBADF])
def test_a_lock_that_fails_is_an_error_and_none_of_another_process(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageError, match=os.strerror(number)), new_directory(tmp_path / "out", 0):
        pass
    with pytest.raises(StorageError, match=os.strerror(number)), claimed(tmp_path / "run"):
        pass
    with pytest.raises(StorageError, match=os.strerror(number)):
        preallocate(tmp_path / "home", 4096)


def test_an_export_whose_directory_others_take_away_leaves_what_was_there(tmp_path: Path):
    former = tmp_path / "out" / "weights"
    former.parent.mkdir()
    former.write_text("former")
    with pytest.raises(StorageError), new_directory(former.parent, 0, overwrite=True) as partial:
        partial.rmdir()
    assert former.read_text() == "former"


def test_an_export_whose_name_is_not_on_the_disk_for_good_is_none(run_dir: Path, tmp_path: Path):
    out = tmp_path / "out"
    with (
        layered(Layer(tmp_path, {Key("fsync", ".", 0, 0, 0): Fault.EIO})) as layer,
        pytest.raises(StorageError, match="Input/output error"),
    ):
        export(run_dir, out)
    assert layer.sprung
    assert list(tmp_path.iterdir()) == []
    export(run_dir, out)


def test_weights_are_in_one_file_or_as_few_as_are_asked_for(run_dir: Path, tmp_path: Path):
    """A run writes a file for each unit."""
    source = latest(run_dir)
    assert source is not None
    shards = sorted(source.glob("model-*.safetensors"))
    assert len(shards) > 2
    out = export(run_dir, tmp_path / "one")
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    few = tmp_path / "few"
    few.mkdir()
    total = sum(shard.stat().st_size for shard in shards)
    join_shards(shards, few, total // 2)
    assert 2 <= len(list(few.glob("model-*.safetensors"))) < len(shards)
    for name in ("config.json", "generation_config.json"):
        (few / name).write_bytes((source / name).read_bytes())
    theirs = dict(AutoModelForCausalLM.from_pretrained(source).named_parameters())
    ours = dict(AutoModelForCausalLM.from_pretrained(few).named_parameters())
    assert all(torch.equal(ours[name], parameter) for name, parameter in theirs.items())


@contextmanager
def loaded(place: Path, **settings: Any) -> Iterator[Any]:
    model = outsize.load(place, trainable=False, device="cpu", device_memory="64MiB", **settings)
    try:
        yield model
    finally:
        runner_of(model).close()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("dtype", "lora"), [("fp32", {"modules_to_save": ["lm_head"], "bias": "lora_only"}), ("bf16", {})]
)
def test_adapters_are_loaded_by_peft_and_without_merging(dtype: str, lora: dict[str, Any], tmp_path: Path):
    """As their model and they are: the logits are those of PEFT, bit for bit, also in another dtype than the run's."""
    run = make_run(
        tmp_path,
        model={"dtype": dtype},
        lora=lora,
        optimizer={"lr": 0.1},
        train={"method": "lora", "steps": 2},
    )
    train(run)
    out = export(tmp_path / "run", tmp_path / "adapters")
    tokens = torch.arange(3, 15)[None]
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        base = AutoModelForCausalLM.from_pretrained(run.model.path, dtype=kind)
        before = base(tokens).logits
        plain = peft.PeftModel.from_pretrained(base, out)
        for home in ("host", "disk"):
            with loaded(out, dtype=name, home=home) as model, torch.inference_mode():
                want, got = plain(tokens).logits, model(tokens).logits
                assert torch.equal(got, want)
                assert not torch.equal(got, before)
                ours = model.generate(tokens, max_new_tokens=4, do_sample=False)
                assert torch.equal(ours, plain.generate(input_ids=tokens, max_new_tokens=4, do_sample=False))
    for codec in ("nf4", "fp8"):
        with loaded(out, dtype="bf16", base_codec=codec, table_codec="int8") as model:
            encoded = model.quantisation_errors()  # of the model, not of its adapters
            assert any("q_proj" in name for name in encoded)
            assert not any("lora_" in name for name in encoded)
            plain.get_base_model().load_state_dict(dict(model.state_dict()))
            ours = model.generate(tokens, max_new_tokens=4, do_sample=False)
            assert torch.equal(ours, plain.generate(input_ids=tokens, max_new_tokens=4, do_sample=False))
    with pytest.raises(ConfigError, match="trainable=False"):
        outsize.load(out)
    config = out / "adapter_config.json"
    for text, says in (('{"peft_type": "LORA"}', "names no model"), ("{", "cannot be read")):
        config.write_text(text)
        with pytest.raises(CheckpointError, match=says):
            outsize.load(out, trainable=False)


class UnreachedError(Exception):
    """What httpx raises derives from nothing else."""


class Recorded:
    """What is asked of the hub."""

    refuses: Exception | None = None
    is_private = True
    asked: ClassVar[list[tuple[str, dict[str, Any]]]] = []

    def create_repo(self, **given: Any) -> RepoUrl:
        if self.refuses is not None:
            raise self.refuses
        validate_repo_id(given["repo_id"])
        self.asked.append(("create", given))
        name = given["repo_id"] if "/" in given["repo_id"] else f"me/{given['repo_id']}"
        return RepoUrl(f"https://huggingface.co/{name}")

    def repo_info(self, repo_id: str) -> SimpleNamespace:
        assert repo_id == "me/mine"
        return SimpleNamespace(private=self.is_private)

    def upload_folder(self, **given: Any) -> None:
        assert given["repo_id"] == "me/mine"
        folder = Path(given["folder_path"])
        paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        names = sorted(filter_repo_objects(paths, ignore_patterns=given["ignore_patterns"]))
        self.asked.append(("upload", {**given, "names": names}))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Recorded]:
    monkeypatch.setattr(Recorded, "asked", [])
    monkeypatch.setattr("huggingface_hub.HfApi", Recorded)
    return Recorded


@pytest.mark.parametrize("name", ["me/mine", "mine"])
def test_a_model_is_sent_to_the_hub_with_a_card(
    name: str, hub: type[Recorded], run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert status_of("export", run_dir, "--out", out, "--push", name) == 0
    assert "sent to https://huggingface.co/me/mine" in capsys.readouterr().out
    (made, how), (sent, what) = hub.asked
    assert (made, how["private"], sent) == ("create", True, "upload")
    assert {"README.md", "config.json", "model.safetensors"} <= set(what["names"])
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "| steps | 2 |" in card
    assert str(run_dir.parent) not in card


@pytest.mark.parametrize("merge", [False, True])
def test_an_export_into_a_checkpoint_is_refused_and_changes_nothing(
    merge: bool, run_dir: Path, tmp_path: Path
):
    saved = latest(run_dir)
    assert saved is not None
    before = sorted(saved.parent.rglob("*"))
    (tmp_path / "link").symlink_to(saved)
    for out in (saved, saved / "export", saved.parent / "mine", tmp_path / "link/export"):
        with pytest.raises(ConfigError, match=r"lies among the checkpoints of the run .* outside of it"):
            export(run_dir, out, merge=merge)
    assert sorted(saved.parent.rglob("*")) == before


def test_nothing_outside_of_a_model_is_sent_through_a_link(
    hub: type[Recorded], run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    export(run_dir, tmp_path / "out")
    (tmp_path / "secret").write_text("of another", encoding="utf-8")
    (tmp_path / "out/below").mkdir()
    for name in ("notes [1].txt", "below/notes.txt"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "secret")
    (tmp_path / "out/gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "out/same.json").symlink_to("config.json")
    Hub("me/mine").upload(tmp_path / "out", run_dir)
    names = hub.asked[-1][1]["names"]
    assert {"config.json", "same.json", "model.safetensors"} <= set(names)
    assert not [name for name in names if "notes" in name or "gone" in name]
    assert "notes [1].txt links to a file outside" in caplog.text


def test_a_hub_that_refuses_does_so_before_anything_is_written(
    hub: type[Recorded],
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    arguments = ("export", run_dir, "--out", tmp_path / "out", "--push")
    assert status_of(*arguments, "a/b/c") == 2
    monkeypatch.setattr(hub, "refuses", LocalTokenNotFoundError("Token is required"))
    assert status_of(*arguments, "me/mine") == 2
    assert "`hf auth login` with a token" in capsys.readouterr().err
    monkeypatch.setattr(hub, "refuses", UnreachedError("no route"))
    assert status_of(*arguments, "me/mine") == 2
    told = capsys.readouterr().err
    assert "no route; look at the network" in told
    assert "hf auth login" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lacks", ["room", "a checkpoint", "an empty place"])
def test_nothing_is_made_on_the_hub_for_an_export_that_cannot_be(
    lacks: str, hub: type[Recorded], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    out, run = tmp_path / "out", tmp_path if lacks == "a checkpoint" else run_dir
    if lacks == "room":
        monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    if lacks == "an empty place":
        out.write_text("here")
    assert status_of("export", run, "--out", out, "--push", "me/mine") == 2
    assert hub.asked == []


def test_what_everybody_sees_is_asked_for(
    hub: type[Recorded],
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(hub, "is_private", False)
    arguments = ("export", run_dir, "--out", tmp_path / "out")
    assert status_of(*arguments, "--push", "me/mine") == 2
    assert status_of(*arguments, "--public") == 2
    assert "add --push OWNER/NAME" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert status_of(*arguments, "--push", "me/mine", "--public") == 0


def test_a_card_names_ids_of_the_hub_and_no_paths(tmp_path: Path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    names = ("me/model", "models/mine", "~/mine", "./mine", "/mine", "a/b/c", "../mine", "mine")
    assert [name for name in names if _is_on_the_hub(name, tmp_path / "runs" / "one")] == ["me/model"]
