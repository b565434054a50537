"""Begin from adapters, write adapters, and locate the model of a run, or its adapters."""

import copy
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from outsize import files
from outsize.checkpoint.checkpoint_state import CHECKPOINTS, exported
from outsize.checkpoint.files.checkpoint_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Beside,
    lone_template,
    write_beside,
)
from outsize.checkpoint.files.checkpoint_format import FileSum, TensorWriter, bytes_of, sum_the_rest
from outsize.checkpoint.files.checkpoint_map import Chunk, pieces
from outsize.checkpoint.trainer_checkpoint import is_trainers
from outsize.config import Config, load_config, parse_config
from outsize.config.messages import as_config_error
from outsize.config.train_section import OWN_KEYS, LoraConfig
from outsize.errors import ConfigError
from outsize.model.adapters import Adapters
from outsize.model.sizes.model_spec import UnitSpec
from outsize.model.stored_adapters import StoredAdapters, find_adapters


class AdapterWriter:
    """Writes what ``PeftModel.from_pretrained`` loads. Every method raises `OSError` as the system says.

    They are ``adapter_model.safetensors``, unit by unit, and ``adapter_config.json``.

    Args:
        directory: is there, and holds no checkpoint.
        adapters: of the model.
        units: those that train, in the order in which they will come.

    Attributes:
        files: size and checksum of each file written, by name; all are synced.
    """

    def __init__(self, directory: Path, adapters: Adapters, units: Sequence[UnitSpec]) -> None:
        self.files: dict[str, FileSum] = {}
        self._directory = directory
        self._config = adapters.config
        entries = ((adapters.names[t.name], torch.float32, t.shape) for unit in units for t in unit.tensors)
        self._file: TensorWriter | None = TensorWriter(directory / ADAPTER_WEIGHTS, entries)

    def stream_unit(self, unit: UnitSpec, dtype: torch.dtype, chunks: Iterable[Chunk]) -> None:
        """Write the adapters of ``unit`` from the chunks of its plane of weights."""
        assert self._file is not None
        for start, chunk in chunks:
            for _, _, piece in pieces(unit.tensors, start, chunk):
                self._file.write(bytes_of(piece))

    def shard_of(self, unit: UnitSpec) -> str:
        """Name of the file that holds the adapters of ``unit``."""
        return ADAPTER_WEIGHTS

    def finish(self, hf_config: Any, beside: Beside) -> None:
        """Write everything but weights; ``beside`` are the files beside them."""
        assert self._file is not None
        self.files[ADAPTER_WEIGHTS] = self._file.sync()
        self.close()
        files.write_text(self._directory / ADAPTER_CONFIG, _config_text(self._config))
        write_beside(self._directory, beside)
        sum_the_rest(self._directory, self.files)

    def close(self) -> None:
        """Close the file of weights; idempotent."""
        if self._file is not None:
            self._file.__exit__()
            self._file = None


def _config_text(config: Any) -> str:
    saved = copy.copy(config)
    saved.inference_mode = True  # as PEFT's own save_pretrained says
    entries = {k: sorted(v) if isinstance(v, set) else v for k, v in saved.to_dict().items()}
    return json.dumps(entries, indent=2, sort_keys=True) + "\n"


def servable(model: str) -> str:
    """Return the directory or hub id that a model can be loaded from: of a run its best checkpoint, else the newest.

    Raises:
        CheckpointError: a run has no checkpoint.
    """
    path = Path(os.path.expanduser(model))
    is_run = (path / "heartbeat.jsonl").is_file() and not (path / "config.json").is_file()
    if not is_run and not (path / CHECKPOINTS).is_dir():
        return model
    return str(exported(path))


def with_saved_model(config: Config, announce: Callable[[str], None] = lambda _: None) -> Config:
    """Return a run whose model may be named as `outsize generate` takes it: a run by its checkpoint, adapters by base.

    Adapters go on as ``lora.from``, by ``train.method=lora`` unless the user says otherwise.

    Raises:
        OutsizeError: a run has no checkpoint, or adapters cannot be read or begun with.
    """
    path, teacher = servable(config.model.path), config.train.teacher and servable(config.train.teacher)
    if path != config.model.path:
        path, goes_on = _begun_with(config, path)
        verb = "goes on, as it began," if goes_on else "begins"
        announce(f"note: {config.model.path} is a run, and this one {verb} with its weights in {path}")
    tree = config.model_dump(exclude_unset=True, by_alias=True)
    is_model = (Path(os.path.expanduser(path)) / "config.json").is_file()
    stored = None if is_model else find_adapters(path)
    if stored is not None and tree.setdefault("train", {}).setdefault("method", "lora") == "lora":
        if tree.get("lora", {}).get("from") not in (None, path):
            raise ConfigError(
                f"model.path: {path} holds adapters, and lora.from names others, {tree['lora']['from']}; with "
                f"model.path: {stored.base} the latter train on alone"
            )
        tree["lora"] = {**tree.get("lora", {}), "from": path}
        announce(f"note: {path} holds adapters of {stored.base}, which train on beside it (lora.from)")
        path = stored.base
    if (path, teacher) == (config.model.path, config.train.teacher):
        return config
    tree["model"]["path"] = path
    if teacher is not None:
        tree["train"]["teacher"] = teacher
    return parse_config(tree)


def _begun_with(config: Config, path: str) -> tuple[str, bool]:
    """Return ``path``, a checkpoint, or another of its run that the run began with which ``config`` goes on with.

    Returns:
        The checkpoint, and whether the run has said so that goes on.
    """
    resume = {"none": None, "auto": config.train.run_dir}.get(config.train.resume, config.train.resume)
    run = Path(os.path.expanduser(resume or "."))
    places = (run, *run.parents[:2]) if resume else ()  # of a checkpoint in it, its own is two above
    for place in (each / "config.yaml" for each in places):
        try:
            before = load_config(place, environ={}) if place.is_file() else config
        except ConfigError:
            continue  # a broken one counts as none, and is told where the run goes on
        for begun in (before.model.path, before.lora.begins_with or ""):
            if Path(begun).is_dir() and Path(begun).resolve().parent == Path(path).resolve().parent:
                return begun, True
    return path, False


# What PEFT notes of adapters that says nothing of what they compute.
_NOTED = (
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
    "runtime_config megatron_config megatron_core loftq_config eva_config corda_config "
    "lora_ga_config init_lora_weights ensure_weight_tying"
)
_NOTES = frozenset(_NOTED.split())
# What PEFT takes null for.
_EMPTY: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False}
_WITH_WRAP = "train them on with PEFT's model in outsize.wrap"


def with_begun_adapters(
    config: Config, resumed: Path | None = None, announce: Callable[[str], None] = lambda _: None
) -> tuple[Config, Path | None]:
    """Return a run with the settings of the adapters that it begins with, and their directory; None for no directory.

    Adapters that others made say what adapters they are, so the section ``lora`` is theirs: what the user has said as
    well has to be the same.

    Args:
        config: of the run.
        resumed: checkpoint that it goes on from; None for none.
        announce: told where the adapters are of another model.

    Raises:
        CheckpointError: adapters cannot be read.
        ConfigError: there are none where ``lora.from`` says, the user has said other settings, or they are more than
            ``train.method=lora`` trains.
    """
    lora, path = config.lora, config.model.path
    stored = _find(lora, path, resumed) if config.train.method == "lora" else None
    if stored is None:
        return config, resumed
    line = _of_another_model(stored, config)
    if line is not None:
        announce(line)
    return _with_template_of(stored, _with_settings_of(stored, config)), stored.directory


def _find(lora: LoraConfig, path: str, resumed: Path | None) -> StoredAdapters | None:
    """Return the adapters that say what a run trains; None where the section ``lora`` does."""
    given = lora.begins_with
    if resumed is None and given is None:
        return None
    if resumed is not None and given is None and not is_trainers(resumed):
        return None  # a run of ours, whose section is checked against the checkpoint
    place = str(resumed) if resumed is not None else servable(str(given))
    stored = find_adapters(place, path)
    if stored is None:
        raise ConfigError(
            f"lora.from: {given} holds no adapters; give a directory with an adapter_config.json"
        )
    return stored


def _with_settings_of(stored: StoredAdapters, config: Config) -> Config:
    """Return ``config`` with the section ``lora`` that makes adapters like those stored."""
    theirs, given = _settings(stored), config.lora.model_fields_set
    ours = config.lora.for_peft()
    for key, value in theirs.items():
        if key in given and key != "lora_dropout" and _plain(ours[key]) != _plain(value):
            raise ConfigError(
                f"lora.{key}: the adapters in {stored.directory} have {_shown(value)}, not {_shown(ours[key])}; leave "
                "it out, or begin with others"
            )
    if "lora_dropout" in given:
        theirs["lora_dropout"] = ours["lora_dropout"]
    try:
        section = type(config.lora).model_validate({**config.lora.model_dump(), **theirs})
    except ValidationError as error:
        raise ConfigError(
            f"{stored.directory / ADAPTER_CONFIG}: {as_config_error(error, {})}; correct it there, or begin with others"
        ) from error
    return config.model_copy(update={"lora": section})


def _with_template_of(stored: StoredAdapters, config: Config) -> Config:
    """Return ``config`` with the chat template that lies beside stored adapters without a tokenizer, if any does."""
    template = lone_template(stored.directory)
    if template is None or config.data.template is not None:
        return config
    return config.model_copy(
        update={"data": config.data.model_copy(update={"template": str(template.resolve())})}
    )


def _of_another_model(stored: StoredAdapters, config: Config) -> str | None:
    """Return a line where adapters name another model, which is there, than the one that is trained."""
    named = stored.config.base_model_name_or_path
    if not named or not Path(named).exists() or not Path(config.model.path).exists():
        return None
    if Path(named).resolve() == Path(os.path.expanduser(config.model.path)).resolve():
        return None
    return f"note: {stored.directory} holds adapters of {named}, and model.path is {config.model.path}"


def _settings(stored: StoredAdapters) -> dict[str, Any]:
    """Return the keys of the section ``lora`` as stored adapters have them."""
    import peft

    stored_config, where = stored.config, stored.directory
    if not isinstance(stored_config, peft.LoraConfig) or isinstance(stored_config, peft.AdaLoraConfig):
        raise ConfigError(
            f"{where} holds adapters of the kind {stored_config.peft_type.value}, and train.method=lora trains LoRA; "
            f"{_WITH_WRAP}"
        )
    keys = LoraConfig.model_fields.keys() - OWN_KEYS
    plain = peft.LoraConfig()
    for key in vars(plain).keys() - keys - _NOTES:
        if key in type(stored_config).__dataclass_fields__ and getattr(stored_config, key) != getattr(
            plain, key
        ):
            raise ConfigError(
                f"{where} holds adapters with {key}, which train.method=lora does not train; {_WITH_WRAP}"
            )
    start = stored_config.init_lora_weights
    if isinstance(start, str) and start not in ("gaussian", "eva", "orthogonal", "lora_ga"):
        raise ConfigError(
            f"{where} holds adapters with init_lora_weights={start}, which needs other weights of "
            f"the model, or trains a part of them; {_WITH_WRAP}"
        )
    settings = {
        key: _as_said(key, getattr(stored_config, key)) for key in sorted(keys) if hasattr(stored_config, key)
    }
    return {**settings, "init_lora_weights": True}  # they have begun


def _as_said(key: str, value: Any) -> Any:
    """Return a value of PEFT's configuration as the section has it."""
    if value is None and key in _EMPTY:
        return _EMPTY[key]
    if key == "layers_to_transform" and isinstance(value, int):
        return (value,)
    if value == "":
        return None
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    return tuple(value) or None if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a value that equals that of all spellings of the same."""
    if isinstance(value, tuple | list | set):
        return frozenset(value) or None
    return None if isinstance(value, Mapping) and not value else value


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
