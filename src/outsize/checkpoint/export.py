"""Write the newest checkpoint of a run out as a plain Hugging Face model, or as adapters of one."""

import shutil
from pathlib import Path

from outsize.checkpoint import merge as merging
from outsize.checkpoint.checkpoint_dir import STATE, latest
from outsize.checkpoint.checkpoint_state import OPTIMIZER
from outsize.errors import CheckpointError, StorageError
from outsize.storage.prealloc import explain


def export(
    run_dir: str | Path, out_dir: str | Path, *, merge: bool = False, trust_remote_code: bool = False
) -> Path:
    """Write the weights, config and tokenizer of the newest checkpoint of ``run_dir`` to ``out_dir``.

    Of a run with ``train.method=lora`` these are adapters in PEFT's format; with ``merge`` it is the whole model, with
    its adapters merged in; ``trust_remote_code`` lets code that comes with that model run.

    Raises:
        CheckpointError: the run has no checkpoint, or there is nothing to merge.
        ModelError: the adapters cannot be merged.
        StorageError: ``out_dir`` is not empty or cannot be written; nothing half-written is left.
    """
    source = latest(Path(run_dir))
    if source is None:
        raise CheckpointError(
            f"{run_dir} holds no checkpoint; is it the directory of a run that has saved one?"
        )
    target = Path(out_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise StorageError(f"{target} exists already; choose another directory or remove it")
    if merge:
        return merging.merge(source, target, trust_remote_code)
    partial = target.with_name(target.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns(OPTIMIZER, STATE))
        if target.exists():
            target.rmdir()
        partial.rename(target)
    except shutil.Error as error:  # one entry ``(source, target, why)`` for each file
        why = error.args[0][0][2]
        raise StorageError(
            f"cannot write {target}: {why}; free some space or choose another directory"
        ) from error
    except OSError as error:
        raise explain(error, f"write {target}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target
