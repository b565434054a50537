"""Adapters of a run merged into its model, unit by unit, by PEFT's own layers.

A skeleton of the adapted model holds PEFT's layers. For each parameter that one of them stands around, the weights of
that layer alone are read, merged as ``merge_and_unload`` would, and let go. So the memory of one unit suffices.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from outsize.checkpoint.checkpoint_state import STATE, read_state
from outsize.checkpoint.files.checkpoint_files import ADAPTER_WEIGHTS, locate_checkpoint
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader
from outsize.checkpoint.files.checkpoint_writer import write_checkpoint
from outsize.checkpoint.saving_room import weight_bytes
from outsize.checkpoint.trainer_checkpoint import is_trainers
from outsize.compat.torch_private import parameters_of
from outsize.errors import CheckpointError, ModelError
from outsize.model.adapters import Adapters, AdapterSource, put_in
from outsize.model.build import DTYPES, build_skeleton, load_hf_config, unquantised
from outsize.model.sizes.model_spec import UnitSpec
from outsize.model.split import split
from outsize.model.stored_adapters import find_adapters


def merge(
    checkpoint: Path,
    out_dir: Path,
    trust_remote_code: bool = False,
    base: str | None = None,
    ready: Callable[[], object] | None = None,
) -> Path:
    """Write the model of ``checkpoint``, its adapters merged in, as a Hugging Face model of the run's dtype.

    Args:
        checkpoint: of a run with ``train.method=lora``.
        out_dir: where to; empty, or not there yet.
        trust_remote_code: whether code that comes with the model may run.
        base: the model, where the one that the adapters name is not there.
        ready: called before anything is written, once nothing is known to forbid it.

    Raises:
        CheckpointError: it holds no adapters, or the model that they belong to is not where it was.
        ModelError: they cannot be merged.
        StorageError: ``out_dir`` is not empty or cannot be written; nothing half-written is left.
    """
    if not (checkpoint / ADAPTER_WEIGHTS).is_file():
        raise CheckpointError(
            f"{checkpoint} holds no adapters, so there is nothing to merge; leave --merge out"
        )
    stored = find_adapters(str(checkpoint), base)
    assert stored is not None
    config, path = stored.config, stored.base
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ModelError(
            f"{checkpoint} holds adapters of a model for {config.task_type}; merge them with PEFT's merge_and_unload"
        )
    hf_config = unquantised(load_hf_config(path, trust_remote_code))
    dtype = _dtype_of(checkpoint, hf_config)
    plain = build_skeleton(hf_config, dtype, trust_remote_code=trust_remote_code)
    reader = CheckpointReader(locate_checkpoint(path), plain)
    reader.load_buffers(plain)
    adapted = build_skeleton(hf_config, dtype, trust_remote_code=trust_remote_code)
    adapters = put_in(adapted, config, seed=0, weights=stored.weights())
    merged = _Merged(adapted, adapters, AdapterSource(reader, adapters))
    parts = split(plain, dtype)
    for name, places in parts.owners.items():
        merged.check(name, len(places))

    def read(unit: UnitSpec) -> dict[str, Tensor]:
        return {tensor.name: merged.read(tensor.name, tensor.shape, dtype) for tensor in unit.tensors}

    return write_checkpoint(
        out_dir,
        plain,
        hf_config,
        parts.spec.units,
        read,
        tokenizer_source=path,
        adapters=checkpoint,
        num_bytes=weight_bytes(parts.spec, adapters=False),
        ready=ready,
    )


def _dtype_of(checkpoint: Path, hf_config: Any) -> str:
    """Return in which dtype a run has computed; of adapters without the state of a run that of their model."""
    if (checkpoint / STATE).is_file() and not is_trainers(checkpoint):
        return str(read_state(checkpoint)["dtype"])
    own = str(getattr(hf_config, "dtype", None) or torch.float32).removeprefix("torch.")
    return next((name for name, dtype in DTYPES.items() if str(dtype).removeprefix("torch.") == own), "fp32")


class _Merged:
    """Parameters of a model with adapters, merged, under the names that they have without."""

    def __init__(self, adapted: nn.Module, adapters: Adapters, source: AdapterSource) -> None:
        self._adapted = adapted
        self._source = source
        # What trains whole, and is saved under its own name.
        prefix = "base_model.model."
        self._whole = {stored.removeprefix(prefix): own for own, stored in adapters.names.items()}

    def check(self, name: str, num_places: int) -> None:
        """Refuse what two modules share and only one adapts: merged, they would not share it any more.

        Raises:
            ModelError: it is so.
        """
        if num_places > 1 and (name in self._whole or self._layer(name) is not None):
            raise ModelError(
                f"{name} is shared by {num_places} modules (tied weights), and adapters of one of them cannot be "
                "merged into it; use the adapters with PEFT as they are"
            )

    def read(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """Return one parameter, merged."""
        layer = self._layer(name)
        if layer is None:
            return self._read(self._whole.get(name, name), shape, DTYPES[dtype])
        leaf = name.rpartition(".")[2]
        path = name.removesuffix(f".{leaf}")
        former: dict[tuple[nn.Module, str], Any] = {
            (module, n): p for module in layer.modules() for n, p in parameters_of(module).items()
        }
        try:
            wrappers = [module for module in layer.modules() if hasattr(module, "parameter_name")]
            base = cast(Any, layer).get_base_layer()
            for inner, parameter in list(layer.named_parameters()):
                owner, _, attribute = inner.rpartition(".")
                if wrappers and attribute != leaf and layer.get_submodule(owner) is base:
                    continue  # another stack of the experts
                value = self._read(f"{path}.{inner}", tuple(parameter.shape), parameter.dtype)
                parameters_of(layer.get_submodule(owner))[attribute] = nn.Parameter(
                    value, requires_grad=False
                )
            for wrapper in [w for w in wrappers if w.parameter_name == leaf] if wrappers else [layer]:
                cast(Any, wrapper).merge()
            return cast(Tensor, base.get_parameter(leaf).detach())
        finally:
            for module in layer.modules():
                getattr(module, "merged_adapters", []).clear()
            for (module, attribute), parameter in former.items():
                parameters_of(module)[attribute] = parameter

    def _layer(self, name: str) -> nn.Module | None:
        """PEFT's layer around the module that holds the parameter; None where there is none."""
        from peft.tuners.lora import LoraLayer

        module = self._adapted.get_submodule(name.rpartition(".")[0])
        return module if isinstance(module, LoraLayer) else None

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        value = torch.empty(shape, dtype=dtype)
        self._source.read(name, 0, value.numel(), value.view(-1))
        return value
