"""Adapters that lie in a directory, as PEFT wrote them: which, of which model, and how they are put in.

PEFT reads its own directory and fills its own layers, so what it loads is what runs here. A kind of adapters is taken
if it is known to compute the same streamed: a table of tests holds every kind of PEFT against PEFT itself.
"""

import copy
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.checkpoint.files.checkpoint_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, locate_checkpoint
from outsize.checkpoint.files.checkpoint_reader import WeightSource
from outsize.compat.transformers_private import changed_weight
from outsize.errors import CheckpointError, ConfigError, ModelError
from outsize.model.adapters import AROUND_MODEL, Adapters, AdapterSource, base_name, put_in
from outsize.model.build import download_small_files
from outsize.model.split import end_of

PICKLED = "adapter_model.bin"
_USE_PEFT = "run them with PEFT itself"
# Kinds that stand in the layers of a model and need nothing of it but those layers' inputs and weights.
_NAMES = (
    "LORA ADALORA ADAPTION_PROMPT BEFT BOFT C3A DEFT DELORA FOURIERFT GLORA GRALORA HIRA HRA IA3 "
    "LILY LN_TUNING LOHA LOKR MISS OFT PEANUT PVERA RANDLORA ROAD SHIRA SUPERTUNING TINYLORA "
    "TRAINABLE_TOKENS UNILORA VBLORA VERA WAVEFT"
)
_KINDS = frozenset(_NAMES.split())
_ANEW = "PEFT computes a part of them anew from all weights of the model whenever it loads them"
_CHOOSES = "they choose anew for each input, outside the layers that they stand in"
_REASONS = {"ADAMSS": _ANEW, "FROD": _ANEW, "OSF": _ANEW, "PSOFT": _ANEW, "POLY": _CHOOSES, "XLORA": _CHOOSES}
# Settings of LoRA with which a forward needs more than the layers.
_BEYOND = ("alora_invocation_tokens", "arrow_config", "kasa_config")
# How LoRA may begin: what leaves the model as it is, and what takes its beginning out of the model's weights.
_LEAVES = (None, True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")
_CHANGES = ("pissa", "olora")
_OTHER_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
_OTHER_CLASSES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


@dataclass(frozen=True, slots=True)
class StoredAdapters:
    """Adapters in a directory.

    Attributes:
        directory: holds them.
        config: PEFT's configuration of them.
        base: path or hub id of the model that they adapt.
    """

    directory: Path
    config: Any
    base: str

    def weights(self) -> dict[str, Tensor]:
        """Return the stored weights by name, as PEFT reads them.

        Raises:
            CheckpointError: they cannot be read.
        """
        return read_weights(self.directory)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return the weights of the adapters in ``directory`` by name, as PEFT reads them.

    Raises:
        CheckpointError: they cannot be read.
    """
    from peft import load_peft_weights

    try:
        return cast(dict[str, Tensor], load_peft_weights(str(directory), device="cpu"))
    except Exception as error:  # of safetensors, of pickle, of the system
        first_line = str(error).strip().partition("\n")[0]
        place = directory / (PICKLED if not (directory / ADAPTER_WEIGHTS).exists() else ADAPTER_WEIGHTS)
        raise CheckpointError(
            f"the weights of the adapters, {place}, cannot be read: {first_line[:200]}; save them again with PEFT, as "
            "safetensors"
        ) from error


def find_adapters(model: str, base: str | None = None) -> StoredAdapters | None:
    """Return the adapters that ``model`` names; None where it names something else.

    Args:
        model: a directory, or the id of a repository on the hub.
        base: the model that they adapt, in place of the one that their configuration names.

    Raises:
        CheckpointError: adapters cannot be read, or the model that they adapt is not there.
        ConfigError: PEFT is not installed.
        ModelError: adapters of a kind that does not run.
    """
    directory = _directory(model)
    if directory is not None and (directory / ADAPTER_CONFIG).is_file():
        config = _config(directory)
        _check_runs(directory, config)
        return StoredAdapters(directory, config, base or _base(directory, config))
    if directory is not None and not (directory / "config.json").is_file():
        named = sorted(path.parent.name for path in directory.glob(f"*/{ADAPTER_CONFIG}"))
        if named:
            raise CheckpointError(
                f"{directory} holds adapters by name ({', '.join(named)}): give one of them, e.g. "
                f"{directory / named[0]}"
            )
    return None


def load_in(model: nn.Module, stored: StoredAdapters, source: WeightSource) -> tuple[Adapters, WeightSource]:
    """Put stored adapters into a skeleton, as ``PeftModel.from_pretrained`` does; returns them and all weights.

    Args:
        model: its parameters on meta; changed in place, its vocabulary too where the adapters have another.
        stored: the adapters.
        source: of the weights of the model without them.

    Raises:
        CheckpointError: the weights are those of other adapters, or of adapters of another model.
    """
    weights, config = stored.weights(), copy.copy(stored.config)
    _resize(model, weights, stored.directory)
    changes = config.init_lora_weights if getattr(config, "init_lora_weights", None) in _CHANGES else None
    if changes is not None:
        config.init_lora_weights = True
    try:
        adapters = put_in(model, config, 0, trains=False, weights=weights)
    except ConfigError as error:
        raise CheckpointError(
            f"{stored.directory} holds adapters for another model than {stored.base}: {error}"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{stored.directory} cannot be put into {stored.base}: {error}") from error
    if changes is None:
        return adapters, AdapterSource(source, adapters)
    return adapters, AdapterSource(_Changed(source, model, adapters, stored.config), adapters)


class _Changed:
    """Weights of a model out of which adapters took what they began with.

    With PiSSA and its kin the weights of adapted layers are what is left, which is stored nowhere: PEFT computes it
    anew whenever it loads such adapters. So it is here, one layer at a time.
    """

    def __init__(self, source: WeightSource, model: nn.Module, adapters: Adapters, config: Any) -> None:
        from peft.tuners.lora import LoraLayer

        self._source = source
        self._adapters, self._config = adapters, config
        self._layers = {
            base_name(f"{path}.weight"): (path, module)
            for path, module in model.named_modules()
            if isinstance(module, LoraLayer)
        }
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def read(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """See `WeightSource.read`."""
        if name not in self._layers:
            self._source.read(name, start, stop, into)
            return
        if self._last[0] != name:
            self._last = (name, self._changed(name, into.dtype))
        into.view(-1).copy_(self._last[1].reshape(-1)[start:stop])

    def _changed(self, name: str, dtype: torch.dtype) -> Tensor:
        path, layer = self._layers[name]
        base = copy.deepcopy(cast(Any, layer).get_base_layer())
        weight = torch.empty(base.weight.shape, dtype=dtype)
        self._source.read(name, 0, weight.numel(), weight.view(-1))
        base.weight = nn.Parameter(weight, requires_grad=False)
        try:
            return changed_weight(self._adapters.around, self._config, path, base)
        except (ImportError, RuntimeError, ValueError, TypeError) as error:
            raise ModelError(
                f"PEFT cannot compute what {path} began with (init_lora_weights={self._config.init_lora_weights}): "
                f"{error}"
            ) from error


def _directory(model: str) -> Path | None:
    """Return the directory that is named, or the local copy of a repository of the hub if that holds adapters."""
    path = Path(os.path.expanduser(model))
    if path.exists() or path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        return path if path.is_dir() else None
    try:
        small = Path(download_small_files(model))
        return locate_checkpoint(model) if (small / ADAPTER_CONFIG).is_file() else None
    except (ModelError, CheckpointError):
        return None  # whoever reads the model says why


def _config(directory: Path) -> Any:
    """Return PEFT's configuration of the adapters in ``directory``, with which they can be put in."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError("adapters need PEFT; install it with: pip install peft") from error
    if not any((directory / name).is_file() for name in (ADAPTER_WEIGHTS, PICKLED)):
        raise CheckpointError(f"{directory} holds no adapters: {ADAPTER_WEIGHTS} is missing")
    try:
        config = peft.PeftConfig.from_pretrained(str(directory))
    except Exception as error:  # of JSON, of the system, of PEFT's checks of each kind
        raise CheckpointError(f"{directory / ADAPTER_CONFIG} cannot be read: {error}") from error
    config.inference_mode = False
    return config


def _check_runs(directory: Path, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind not in _KINDS:
        why = (
            "they are what PEFT puts before a prompt, and stand in no layer"
            if config.is_prompt_learning
            else _REASONS.get(kind, "it is not known to compute the same streamed")
        )
        raise ModelError(
            f"{directory} holds adapters of the kind {kind}, which outsize does not run: {why}; {_USE_PEFT}"
        )
    mapping = config.auto_mapping if isinstance(config.auto_mapping, dict) else {}
    adapted = str(mapping.get("base_model_class"))  # which PEFT notes where no task is named
    if config.task_type in _OTHER_TASKS or adapted.endswith(_OTHER_CLASSES):
        task = (
            f"for the task {config.task_type}"
            if config.task_type in _OTHER_TASKS
            else f"of the class {adapted}"
        )
        raise ModelError(
            f"{directory} holds adapters of a model {task}; outsize runs those of models that predict tokens, or end "
            f"in hidden states; {_USE_PEFT}"
        )
    if kind != "LORA":
        return
    beyond = [key for key in _BEYOND if getattr(config, key, None)]
    init = config.init_lora_weights
    if init not in (*_LEAVES, *_CHANGES) or not isinstance(init, bool | str | None):
        beyond.append(f"init_lora_weights={init}")
    if beyond:
        raise ModelError(
            f"{directory} holds adapters with {beyond[0]}, which outsize does not run; {_USE_PEFT}"
        )


def _base(directory: Path, config: Any) -> str:
    """Return the model that a configuration names, where it is there."""
    where, name = directory / ADAPTER_CONFIG, config.base_model_name_or_path
    other = "say which one they adapt with --base MODEL (base= of outsize.load)"
    if not name:
        raise CheckpointError(f"{where} names no model (base_model_name_or_path); {other}")
    path = Path(os.path.expanduser(name))
    if path.exists():
        return str(name)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CheckpointError(
            f"{where} names {name} as the model of the adapters (base_model_name_or_path), and there is no such "
            f"directory; {other}"
        )
    try:
        download_small_files(name, config.revision)
        return str(locate_checkpoint(name, config.revision)) if config.revision else str(name)
    except (ModelError, CheckpointError) as error:
        raise CheckpointError(
            f"{where} names {name} as the model of the adapters: {error}; {other}"
        ) from error


def _resize(model: nn.Module, weights: Mapping[str, Tensor], directory: Path) -> None:
    """Give a skeleton as many rows of the vocabulary as stored embeddings have."""
    ends = [end_of(model, method) for method in ("get_input_embeddings", "get_output_embeddings")]
    tables = {id(p): p for module in ends if module is not None for p in module.parameters() if p.dim() == 2}
    rows = {
        base_name(name.removeprefix(AROUND_MODEL)): len(value)
        for name, value in weights.items()
        if value.dim()
    }
    named = [(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False) if id(p) in tables]
    stored = {table: rows[name] for name, table in named if name in rows}
    num_rows = set(stored.values())
    if num_rows <= {len(p) for p in tables.values()}:
        return
    if len(stored) < len(tables) or len(num_rows) > 1:
        raise CheckpointError(
            f"{directory} holds {max(num_rows)} rows of the vocabulary for one of the model's two tables alone, and "
            "the other's are stored nowhere; save the resized model, and name it as the model of the adapters (base)"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cast(Any, model).resize_token_embeddings(num_rows.pop(), mean_resizing=False)
