"""Write the newest checkpoint of a run out as a plain Hugging Face model of few files, or as adapters of one."""

from collections.abc import Callable
from pathlib import Path

from outsize import files
from outsize.checkpoint import merge as merging
from outsize.checkpoint.checkpoint_state import latest
from outsize.checkpoint.files.beside_weights import copy_named_templates
from outsize.checkpoint.files.checkpoint_files import INDEX, is_own_file
from outsize.checkpoint.files.checkpoint_shards import join_shards
from outsize.checkpoint.files.checkpoint_writer import new_directory
from outsize.checkpoint.trainer_checkpoint import KEPT
from outsize.errors import CheckpointError, ConfigError


def export(
    run_dir: str | Path,
    out_dir: str | Path,
    *,
    merge: bool = False,
    trust_remote_code: bool = False,
    base: str | None = None,
    ready: Callable[[], object] | None = None,
) -> Path:
    """Write the weights, config and tokenizer of the newest checkpoint of ``run_dir`` to ``out_dir``.

    Of a run with ``train.method=lora`` these are adapters in PEFT's format; with ``merge`` it is the whole model, with
    its adapters merged in; ``trust_remote_code`` lets code that comes with that model run, and ``base`` says where it
    is, if not where the run had it. ``ready`` is called before anything is written, once nothing is known to forbid it.

    Raises:
        CheckpointError: the run has no checkpoint, or there is nothing to merge.
        ConfigError: ``base`` without ``merge``, or ``out_dir`` is within the run's checkpoints.
        ModelError: the adapters cannot be merged.
        StorageError: ``out_dir`` is not empty or cannot be written; nothing half-written is left.
    """
    source = latest(Path(run_dir))
    if source is None:
        raise CheckpointError(
            f"{run_dir} holds no checkpoint; is it the directory of a run that has saved one?"
        )
    target = Path(out_dir)
    if target.resolve().is_relative_to(source.parent.resolve()):
        raise ConfigError(
            f"{target} lies among the checkpoints of the run, which removes old ones with all in them; export to "
            "another directory, such as RUN_DIR/export"
        )
    if base is not None and not merge:
        raise ConfigError("base: names the model that adapters are merged into; merge them, or leave it out")
    if merge:
        return merging.merge(source, target, trust_remote_code, base, ready)
    shards = sorted(source.glob("model-*.safetensors"))
    taken = {*KEPT, INDEX, *(shard.name for shard in shards)} if shards else {*KEPT}
    beside = [path for path in source.iterdir() if path.name not in taken and is_own_file(path, source)]
    num_bytes = sum(path.stat().st_size for path in (*shards, *beside))
    with new_directory(target, num_bytes, ready=ready) as partial:
        for path in beside:
            files.copy(path, partial / path.name)
        copy_named_templates(source, partial)
        if shards:
            join_shards(shards, partial)
    return target
