"""Writing a checkpoint in Hugging Face layout, unit by unit.

`outsize.checkpoint.files.checkpoint_shards` writes the files. `write_checkpoint` has them written into a hidden
directory
beside the destination; when each is complete, synced and seen to hold what the model needs, one rename makes it the
checkpoint. So there is a whole checkpoint or none, whatever goes wrong.
"""

import contextlib
import errno
import glob
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from outsize import files
from outsize.checkpoint.files.checkpoint_files import Beside, read_beside
from outsize.checkpoint.files.checkpoint_shards import CheckpointWriter
from outsize.errors import StorageError, explain
from outsize.model.sizes.model_spec import UnitSpec
from outsize.units import format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)


def write_checkpoint(
    directory: str | os.PathLike[str],
    model_skeleton: nn.Module,
    hf_config: "PretrainedConfig",
    units: Sequence[UnitSpec],
    read: Callable[[UnitSpec], Mapping[str, Tensor]],
    *,
    tokenizer_source: "str | os.PathLike[str] | PreTrainedTokenizerBase | None" = None,
    adapters: Path | None = None,
    overwrite: bool = False,
    num_bytes: int = 0,
    ready: Callable[[], object] | None = None,
) -> Path:
    """Write a checkpoint that ``from_pretrained`` loads, with one shard per unit, and return its directory.

    Names and layout are those of ``save_pretrained``; a tied parameter is written once. The dtype in
    ``config.json`` is the one that most parameters come in.

    Args:
        directory: where it shall stand; made together with its parents.
        model_skeleton: the model, for names and rules; its buffers are written, its parameters are not read.
        hf_config: the config to write, as the user gave it.
        units: all units of the model.
        read: returns the parameters of a unit by name, in their shapes. It is called once per unit, and what
            it returned is let go before the next call.
        tokenizer_source: directory or hub id to copy the tokenizer and the generation config from, or a
            tokenizer.
        adapters: directory of adapters that were merged in, whose tokenizer and chat template go before those.
        overwrite: whether a directory that is there already is replaced, once the new one is complete.
        num_bytes: that there is to be room for; 0 does not look.
        ready: called once there is, see `new_directory`.

    Raises:
        StorageError: the disk is full, the place is not writable, or something is there already.
    """
    final = Path(os.path.expanduser(directory)).absolute()
    with new_directory(final, num_bytes, overwrite=overwrite, ready=ready) as partial:
        writer = CheckpointWriter(partial, model_skeleton, units)
        for unit in units:
            if unit.all_tensors:
                writer.write_unit(unit, read(unit))
        beside: Beside = {}
        if isinstance(tokenizer_source, str | os.PathLike):
            with_code = bool(getattr(hf_config, "auto_map", None))
            beside = read_beside(Path(tokenizer_source), with_code=with_code, adapters=adapters)
        elif tokenizer_source is not None:
            tokenizer_source.save_pretrained(partial)
        writer.finish(hf_config, beside)
    return final


@contextlib.contextmanager
def new_directory(
    final: Path, num_bytes: int, *, overwrite: bool = False, ready: Callable[[], object] | None = None
) -> Iterator[Path]:
    """Give out a hidden directory, which takes the place of ``final`` when it is complete, or is removed.

    ``ready`` is called once there is room, before anything is written.

    Raises:
        StorageError: the disk is full or has no room for ``num_bytes``, the place is not writable, or something is
            there already.
    """
    # What a link leads to is what is meant, and the link stays.
    place = Path(os.path.realpath(final)) if final.is_symlink() else final
    _bring_back_former(place)
    if not overwrite and final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise _in_the_way(final)
    with _storage_errors(final, overwrite):
        if num_bytes > (free := files.free_bytes(final)):
            raise StorageError(
                f"{final} will take {format_bytes(num_bytes)}, and {format_bytes(free)} are free there; free some, or "
                "choose a place on another disk"
            )
        if ready is not None:
            ready()
        with _becoming(place, overwrite) as partial:
            yield partial


@contextlib.contextmanager
def _becoming(final: Path, overwrite: bool) -> Iterator[Path]:
    """Give out a hidden directory beside ``final``; at the end it takes that place, or it is removed.

    The system refuses to rename to a directory that holds something: one that came meanwhile stays.
    """
    files.make_directories(final.parent)
    _remove_abandoned(final)
    with contextlib.ExitStack() as held:
        partial = _new_locked(final, held)
        previous = _former_of(partial)
        identity = os.stat(partial)
        try:
            yield partial
            files.sync(partial)
            if overwrite and final.exists():
                files.system().rename(final, previous)
            files.system().rename(partial, final)
            files.sync(final.parent)
        except BaseException:  # Ctrl-C as well: nothing half-written stays, and what was there comes back
            with contextlib.suppress(OSError):  # its name may not be on the disk for good
                if os.path.samestat(os.stat(final), identity):
                    files.system().rename(final, partial)
            files.system().remove_tree(partial)
            if previous.exists() and not final.exists():
                files.system().rename(previous, final)
            raise
        _remove(previous)


def _new_locked(final: Path, held: contextlib.ExitStack) -> Path:
    """Make a hidden directory beside ``final``, locked as long as ``held`` is open.

    Until it is locked another process may take it for abandoned, and remove it: then there is another one.
    """
    while True:
        partial = final.parent / f".{final.name}.partial-{uuid.uuid4().hex[:8]}"
        files.system().mkdir(partial)
        with contextlib.ExitStack() as opened, contextlib.suppress(FileNotFoundError):
            descriptor = files.system().open(partial, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(files.system().close, descriptor)
            if files.lock(descriptor) and os.path.samestat(os.fstat(descriptor), os.stat(partial)):
                held.enter_context(opened.pop_all())
                return partial


def _former_of(partial: Path) -> Path:
    """Return where what was there before is kept until ``partial`` is in its place."""
    before, _, token = partial.name.rpartition(".partial-")
    return partial.with_name(f"{before}.former-{token}")


def _bring_back_former(final: Path) -> None:
    """Bring back what stood at ``final`` before a process that was killed just before it put another in its place."""
    for aside in final.parent.glob(f".{glob.escape(final.name)}.former-*"):
        before, _, token = aside.name.rpartition(".former-")
        partial = aside.with_name(f"{before}.partial-{token}")
        try:
            if _is_in_use(partial) or _is_in_use(final):
                if not final.exists():
                    says = "%s is what was at %s; unless another process is writing that now, rename it to have it back"
                    _log.warning(says, aside, final)
                continue
            if final.exists():
                _remove(aside)
                continue
            files.system().rename(aside, final)
        except OSError as error:
            _log.warning("%s is what was at %s, and cannot be brought back: %s", aside, final, error)
        else:
            _log.warning("%s is what it was before: a process was killed while it replaced it", final)


def _is_in_use(directory: Path) -> bool:
    """Whether a process may have locked a directory."""
    if not directory.is_dir():
        return False
    with _locked(directory) as is_ours:
        return not is_ours


def _remove(path: Path) -> None:
    """Remove a directory, or a file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        files.system().remove_tree(path)
    elif path.exists() or path.is_symlink():
        files.system().unlink(path)


def _remove_abandoned(final: Path) -> None:
    """Remove what processes have left that were killed while they wrote ``final``; nobody has it locked."""
    for path in final.parent.glob(f".{glob.escape(final.name)}.partial-*"):
        with contextlib.suppress(OSError), _locked(path) as is_ours:
            if is_ours and not path.is_symlink():
                files.system().remove_tree(path)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Lock a directory, where no other process has; give out whether that is so, and is known."""
    descriptor = files.system().open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield files.lock(descriptor, without_locks=False)
    finally:
        files.system().close(descriptor)


def _in_the_way(final: Path) -> StorageError:
    return StorageError(f"{final} exists already; choose another directory or remove it")


@contextlib.contextmanager
def _storage_errors(final: Path, overwrite: bool) -> Iterator[None]:
    """Say what a failing file system means."""
    try:
        yield
    except OSError as error:
        if not overwrite and error.errno in (errno.ENOTEMPTY, errno.EEXIST) and final.is_dir():
            raise _in_the_way(final) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = format_bytes(shutil.disk_usage(final.parent).free)
            raise StorageError(
                f"{final}: the disk is full ({free} free once the partial copy was removed); "
                "free some space or choose another place"
            ) from error
        raise explain(error, f"write {final}", "choose a place you can write to") from error
