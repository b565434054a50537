"""LoRA adapters in the skeleton of a model: PEFT puts them there and begins them; here they are found and named.

PEFT builds its layers around those of the model and begins each adapter with random numbers, in the order of the
modules. It does so here on weights that are all zeros and one number wide, so that a skeleton of any size takes the
memory of its adapters. Then everything is a skeleton again, and `AdapterSource` gives out what the adapters began
with, or what a checkpoint of them holds, and the weights of the model under the names that they have by now.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.checkpoint.files.checkpoint_reader import WeightSource
from outsize.compat.torch_private import parameters_of, version_of
from outsize.errors import CheckpointError, ConfigError
from outsize.model.compiled import Apart, frozen_part, matrices_and_tables
from outsize.model.sizes.model_spec import PartKind

_log = logging.getLogger(__name__)

# What PEFT calls an adapter that nobody named, and what it puts into the names of the modules that it wraps.
ADAPTER_NAME = "default"
AROUND_MODEL = "base_model.model."
_TWICE = (".modules_to_save.", ".original_module.", ".token_adapter.")
_AROUND = (".token_adapter", ".base_layer", f".modules_to_save.{ADAPTER_NAME}", ".original_module")


@dataclass(frozen=True, slots=True)
class Adapters:
    """The adapters of a model.

    Attributes:
        config: PEFT's `LoraConfig`.
        names: of each trained parameter, by its name in the model: its name in a file of adapters.
        initial: what parameters begin with that are not read from the model's checkpoint, by name in the model.
        base: of all other parameters, by name in the model: the name without adapters.
        around: PEFT's model around the model.
    """

    config: Any
    names: Mapping[str, str]
    initial: Mapping[str, Tensor]
    base: Mapping[str, str]
    around: nn.Module

    def apart(self, model: nn.Module, dtype: str, base_codec: str = "raw", table_codec: str = "raw") -> Apart:
        """Return in which frozen part of its unit a parameter lies: all but what trains."""
        matrices, tables = matrices_and_tables(model)
        plain, base, table = (frozen_part(dtype, codec) for codec in ("raw", base_codec, table_codec))

        def part(name: str) -> PartKind | None:
            if name in self.names:
                return None
            return base if name in matrices else table if name in tables else plain

        return part


def peft_config(settings: Mapping[str, Any], base: str, causal: bool) -> Any:
    """Return PEFT's configuration.

    Args:
        settings: by PEFT's own names.
        base: path or hub id of the model, for whoever loads the adapters, from wherever.
        causal: whether the model predicts the next token.

    Raises:
        ConfigError: PEFT is not installed, or does not take the settings.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            "train.method=lora makes its adapters with PEFT; install it with: pip install peft"
        ) from error
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
    if given.get("target_parameters") is None:
        given.pop("target_parameters", None)  # which PEFT has had since 0.17
    task, path = "CAUSAL_LM" if causal else None, Path(os.path.expanduser(base))
    base = str(path.resolve()) if path.exists() else base
    try:
        return peft.LoraConfig(**given, task_type=task, base_model_name_or_path=base)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"lora: {error}") from error


def put_in(
    model: nn.Module,
    config: Any,
    seed: int,
    *,
    trains: bool = True,
    weights: Mapping[str, Tensor] | None = None,
) -> Adapters:
    """Put the adapters of ``config`` into a skeleton, and freeze everything else.

    Args:
        model: its parameters on meta; changed in place, and so are the names of the parameters that PEFT wraps.
        config: from `peft_config`, or of stored adapters.
        seed: the adapters begin as after ``torch.manual_seed(seed); get_peft_model(model, config)``.
        trains: whether they are going to train, which asks for fp32 and for names in a file of adapters.
        weights: what they begin with in place of that, by name in a file of adapters.

    Raises:
        ConfigError: no module is meant, or one that cannot have an adapter.
        CheckpointError: ``weights`` are those of other adapters.
    """
    shells = _empty_out(model, weights or {})
    adapted = _adapted(model, config, seed)
    if weights is not None:
        _take(adapted, model, weights, shells)
    missed = [
        name for name in getattr(config, "target_parameters", None) or () if not _is_adapted(model, name)
    ]
    if missed:
        raise ConfigError(
            f"lora.target_parameters: no parameter is called {missed[0]}; {expert_parameters(model)}"
        )
    _add_by_shadowing(model)
    initial, base = _sources(model, shells, loaded=weights is not None)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if trains:
        _check(trained)
        if getattr(config, "bias", "none") != "none" and not any(name.endswith(".bias") for name in trained):
            _log.warning(
                "lora.bias=%s has no effect: what is adapted of this model has no biases", config.bias
            )
    _replace(model, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
    return Adapters(config, _stored_names(adapted, trained) if trains else {}, initial, base, adapted)


def _adapted(model: nn.Module, config: Any, seed: int) -> nn.Module:
    """Return PEFT's model around ``model``, whose parameters have no bytes of their own."""
    import peft

    base = config.base_model_name_or_path
    is_open = not (getattr(config, "target_modules", None) or getattr(config, "target_parameters", None))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        try:
            adapted = cast(nn.Module, peft.get_peft_model(cast(Any, model), config))
        except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
            if is_open and "target_modules" in str(error):
                error = ValueError("PEFT has no default for this architecture: name lora.target_modules")
            raise ConfigError(f"lora: {error}; {linear_layers(model)}") from error
    config.base_model_name_or_path = base  # PEFT writes there where it thinks that the model came from
    return adapted


@dataclass(frozen=True, slots=True)
class _Shell:
    """A parameter of the model itself while PEFT works on it.

    Attributes:
        parameter: of no bytes, or of zeros where something stored may take its place.
        name: in the model without adapters.
        version: how often its values had been changed before PEFT worked on it.
    """

    parameter: nn.Parameter
    name: str
    version: int


def _empty_out(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[int, _Shell]:
    """Have parameters take no memory but those that ``weights`` may overwrite; return all, by identity."""
    stored = {base_name(name.removeprefix(AROUND_MODEL)) for name in weights}
    rewritten = {id(p) for n, p in model.named_parameters(remove_duplicate=False) if n in stored}

    def make(p: nn.Parameter) -> Tensor:
        if id(p) in rewritten:
            return torch.zeros(p.shape, dtype=p.dtype)
        return torch.zeros((), dtype=p.dtype).expand(p.shape)

    _replace(model, make)
    return {id(p): _Shell(p, name, version_of(p)) for name, p in model.named_parameters()}


def _take(
    adapted: nn.Module, model: nn.Module, weights: Mapping[str, Tensor], shells: Mapping[int, _Shell]
) -> None:
    """Have adapters take stored weights, as PEFT loads them."""
    from peft import set_peft_model_state_dict
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING

    try:
        result = set_peft_model_state_dict(adapted, dict(weights), ADAPTER_NAME)
    except (KeyError, RuntimeError, ValueError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines()]
        raise CheckpointError(f"the stored weights do not fit the adapters: {lines[-1][:200]}") from error
    # What has not the prefix of its kind is no weight, such as the count of ranks that AdaLoRA keeps for itself.
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING.get(cast(Any, adapted).peft_config[ADAPTER_NAME].peft_type, "")
    lacking = set(result.missing_keys)  # what several modules share is stored under one of its names
    ids = {id(p) for name, p in adapted.named_parameters(remove_duplicate=False) if name not in lacking}
    missing = sorted(
        name
        for name, p in model.named_parameters()
        if prefix in name and id(p) not in shells and id(p) not in ids
    )
    # Where embeddings are saved beside modules that train whole, PEFT writes those twice, and reads one.
    unknown = [key for key in result.unexpected_keys if not any(part in key for part in _TWICE)]
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"nothing here is called {unknown[0]}"
        raise CheckpointError(f"the stored weights are of other adapters: {what}")


def _sources(
    model: nn.Module, shells: Mapping[int, _Shell], *, loaded: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what parameters begin with by name, and of those of the model itself their names there."""
    initial, base = {}, {}
    for name, p in model.named_parameters():
        shell = shells.get(id(p))
        if shell is not None and version_of(p) == shell.version:
            base[name] = shell.name
        elif shell is None and not loaded and f".modules_to_save.{ADAPTER_NAME}" in name:
            base[name] = base_name(name)  # a copy of a module
        else:
            initial[name] = p.detach()
    return initial, base


def _stored_names(adapted: nn.Module, trained: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return the name in a file of adapters of each parameter that trains."""
    from peft.utils import get_peft_model_state_dict

    state = adapted.state_dict()
    names_by_id = {id(value): name.removeprefix(AROUND_MODEL) for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stored = get_peft_model_state_dict(adapted, state_dict=state, save_embedding_layers=False)
    names = {
        names_by_id[id(value)]: name for name, value in stored.items() if names_by_id[id(value)] in trained
    }
    missing = trained.keys() - names.keys()
    if missing:
        raise ConfigError(f"lora: PEFT trains {sorted(missing)[0]} and does not save it; leave it out")
    return {name: names[name] for name in trained}


def linear_layers(model: nn.Module) -> str:
    """Return a sentence with the last parts of the names of a model's linear layers, which adapters are put around."""
    from transformers.pytorch_utils import Conv1D

    kinds = (nn.Linear, Conv1D)
    names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, kinds) and n})
    return f"the linear layers of this model are {', '.join(names) or 'none'}"


def expert_parameters(model: nn.Module) -> str:
    """Return a sentence with the ends of the names of a model's stacks of matrices, one for each expert."""
    stacks = (base_name(name).split(".") for name, p in model.named_parameters() if p.dim() == 3)
    names = sorted({".".join(parts[-2:]) for parts in stacks})
    return f"the stacked experts of this model are {', '.join(names) or 'none'}"


def _is_adapted(model: nn.Module, name: str) -> bool:
    """Whether a parameter of that name, or whose name ends so, has an adapter."""
    wrappers = (path for path, module in model.named_modules() if hasattr(module, "parameter_name"))
    names = (f".{base_name(path)}.{model.get_submodule(path).parameter_name}" for path in wrappers)
    return any(each.endswith(f".{name}") for each in names)


def _add_by_shadowing(model: nn.Module) -> None:
    """Have adapters of parameters add themselves in the module's own dictionary, where they hide the parameter.

    PEFT changes the module's class for each call, and a cache of the process, which lanes of several devices would
    share. The sum is PEFT's, operation by operation.
    """
    from peft.tuners.lora.layer import ParamWrapper

    class Shadowing(ParamWrapper):  # type: ignore[misc]
        @contextlib.contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            base, name, parameter = self.get_base_layer(), self.parameter_name, self.get_param()
            (adapter,) = active_adapters
            if self.num_experts > 1:
                lhs, rhs, scaling = self.get_delta_factors(adapter)
                adapted = torch.baddbmm(parameter, lhs, rhs, alpha=scaling)
            else:
                adapted = parameter + self.get_delta_weight(adapter)
            vars(base)[name] = adapted
            try:
                yield
            finally:
                del vars(base)[name]

    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = Shadowing


class AdapterSource:
    """Weights of a model with adapters: the model's own from ``base``, the adapters' as they begin.

    Args:
        base: of the model without adapters.
        adapters: of the model.
    """

    def __init__(self, base: WeightSource, adapters: Adapters) -> None:
        self._base = base
        self._adapters = adapters

    def read(self, name: str, start: int, stop: int, into: Tensor) -> None:
        """See `WeightSource.read`."""
        if name in self._adapters.initial:
            into.view(-1).copy_(self._adapters.initial[name].reshape(-1)[start:stop])
        else:
            self._base.read(self._adapters.base[name], start, stop, into)


def base_name(name: str) -> str:
    """The name that a parameter has in the model without adapters."""
    for around in _AROUND:
        name = name.replace(around, "")
    return name


def _check(trained: Mapping[str, nn.Parameter]) -> None:
    other = [name for name, parameter in trained.items() if parameter.dtype is not torch.float32]
    if other:
        raise ConfigError(
            f"lora: {other[0]} would train in {trained[other[0]].dtype}; lora.bias and lora.modules_to_save need "
            "model.dtype=fp32"
        )


def _replace(model: nn.Module, make: Any) -> None:
    """Replace every parameter by one of the same form; what is tied stays tied."""
    replacements: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(parameters_of(module).items()):
            if parameter is not None:
                if id(parameter) not in replacements:
                    replacements[id(parameter)] = nn.Parameter(
                        make(parameter), requires_grad=parameter.requires_grad
                    )
                parameters_of(module)[name] = replacements[id(parameter)]
