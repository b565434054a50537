"""The adapters that a run with ``train.method=lora`` begins with, or goes on with, where others made them.

They say what adapters they are, so the section ``lora`` is theirs: what the user has said as well has to be the same.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from outsize.checkpoint.files.checkpoint_files import ADAPTER_CONFIG, lone_template
from outsize.checkpoint.trained_model import servable
from outsize.checkpoint.trainer_checkpoint import is_trainers
from outsize.config import Config
from outsize.config.messages import as_config_error
from outsize.config.train_section import OWN_KEYS, LoraConfig
from outsize.errors import ConfigError
from outsize.model.stored_adapters import StoredAdapters, find_adapters

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

    Args:
        config: of the run.
        resumed: checkpoint that it goes on from; None for none.
        announce: told where the adapters are of another model.

    Raises:
        CheckpointError: adapters cannot be read.
        ConfigError: there are none where ``lora.from`` says, the user has said other settings, or they are more than
            ``train.method=lora`` trains.
    """
    stored = _find(config, resumed)
    if stored is None:
        return config, resumed
    line = _of_another_model(stored, config)
    if line is not None:
        announce(line)
    return _with_template_of(stored, _with_settings_of(stored, config)), stored.directory


def _find(config: Config, resumed: Path | None) -> StoredAdapters | None:
    """Return the adapters that say what a run trains; None where the section ``lora`` does."""
    given = config.lora.begins_with
    if config.train.method != "lora" or (resumed is None and given is None):
        return None
    if resumed is not None and given is None and not is_trainers(resumed):
        return None  # a run of ours, whose section is checked against the checkpoint
    place = str(resumed) if resumed is not None else servable(str(given))
    stored = find_adapters(place, config.model.path)
    if stored is None:
        raise ConfigError(
            f"lora.from: {given} holds no adapters; give a directory with an adapter_config.json"
        )
    return stored


def _with_settings_of(stored: StoredAdapters, config: Config) -> Config:
    """Return ``config`` with the section ``lora`` that makes adapters like those stored."""
    theirs, said = _settings(stored), config.lora.model_fields_set
    ours = config.lora.for_peft()
    for key, value in theirs.items():
        if key in said and key != "lora_dropout" and _plain(ours[key]) != _plain(value):
            raise ConfigError(
                f"lora.{key}: the adapters in {stored.directory} have {_shown(value)}, not {_shown(ours[key])}; leave "
                "it out, or begin with others"
            )
    if "lora_dropout" in said:
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

    found, where = stored.config, stored.directory
    if not isinstance(found, peft.LoraConfig) or isinstance(found, peft.AdaLoraConfig):
        raise ConfigError(
            f"{where} holds adapters of the kind {found.peft_type.value}, and train.method=lora trains LoRA; "
            f"{_WITH_WRAP}"
        )
    keys = LoraConfig.model_fields.keys() - OWN_KEYS
    plain = peft.LoraConfig()
    for key in vars(plain).keys() - keys - _NOTES:
        if key in type(found).__dataclass_fields__ and getattr(found, key) != getattr(plain, key):
            raise ConfigError(
                f"{where} holds adapters with {key}, which train.method=lora does not train; {_WITH_WRAP}"
            )
    if isinstance(found.init_lora_weights, str) and found.init_lora_weights not in (
        "gaussian",
        "eva",
        "orthogonal",
        "lora_ga",
    ):
        raise ConfigError(
            f"{where} holds adapters with init_lora_weights={found.init_lora_weights}, which needs other weights of "
            f"the model, or trains a part of them; {_WITH_WRAP}"
        )
    taken = {key: _as_said(key, getattr(found, key)) for key in sorted(keys) if hasattr(found, key)}
    return {**taken, "init_lora_weights": True}  # they have begun


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
