"""What a model is made of, from its config alone: a table of units, ready for JSON. Reads no weights."""

import os
from typing import Any

from outsize.model.build import build_skeleton, load_hf_config
from outsize.model.sizes.model_spec import UnitSpec
from outsize.model.split import split


def inspect(
    path: str | os.PathLike[str], dtype: str = "bf16", trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return the units of a model and their bytes.

    Args:
        path: model directory, bare ``config.json`` or hub id.
        dtype: compute dtype that weights are counted in, ``fp32``, ``bf16`` or ``fp16``.
        trust_remote_code: whether code that comes with the model may run.

    Returns:
        ``architecture``, ``dtype``, ``num_parameters`` and ``num_trainable`` (each counted once, without
        padding), ``training_state_bytes`` (fp32 weights, gradients and two moments), ``largest_unit_bytes``
        (weights in ``dtype``) and ``units``, each with ``index``, ``name``, ``kind``, ``num_parameters`` and
        ``weight_bytes``.

    Raises:
        ModelError: no such model, or one that cannot be built or split.
    """
    config = load_hf_config(path, trust_remote_code)
    model = build_skeleton(config, dtype, trust_remote_code=trust_remote_code, frozen=True)
    spec = split(model, dtype).spec
    return {
        "architecture": type(model).__name__,
        "dtype": dtype,
        "num_parameters": spec.num_parameters,
        "num_trainable": spec.num_trainable,
        "training_state_bytes": spec.training_state_bytes,
        "largest_unit_bytes": max(unit.weight_bytes(dtype) for unit in spec.units),
        "units": [_row(unit, dtype) for unit in spec.units],
    }


def _row(unit: UnitSpec, dtype: str) -> dict[str, Any]:
    return {
        "index": unit.index,
        "name": unit.name,
        "kind": unit.kind,
        "num_parameters": sum(tensor.numel for tensor in unit.tensors),
        "weight_bytes": unit.weight_bytes(dtype),
    }
