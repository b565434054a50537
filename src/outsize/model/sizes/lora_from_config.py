"""LoRA adapters beside a model whose sizes its config tells: their parameters, operations and memory. No torch.

What PEFT's `LoraConfig` does to a linear layer of ``out`` times ``in``: two matrices beside it, ``r`` times ``in`` and
``out`` times ``r``, in fp32, and the layer itself frozen. A trained run has its adapters made by PEFT
(`model.adapters`); this is for asking about models that are not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from outsize.errors import ConfigError
from outsize.model.sizes.model_spec import (
    FrozenPart,
    ModelSpec,
    PartKind,
    TensorSpec,
    UnitSpec,
    Workload,
    pack_part,
    pack_unit,
)

# The linear layers of the families, by PEFT's names, and what PEFT adapts of them where nobody says.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DEFAULT_MODULES = ("q_proj", "v_proj")
ALL_LINEAR = "all-linear"
_FP32 = 4


def parse_modules(text: str | None) -> tuple[str, ...]:
    """Return the modules that ``text`` names, separated by commas; None is PEFT's choice.

    Raises:
        ConfigError: a name that no family has (suggests the nearest).
    """
    if text is None:
        return DEFAULT_MODULES
    if text.strip() == ALL_LINEAR:
        return MODULES
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names or ("",):
        if name not in MODULES:
            near = get_close_matches(name, (*MODULES, ALL_LINEAR), n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(MODULES)}, or {ALL_LINEAR}"
            raise ConfigError(f"no linear layer is called {name!r}; {hint}")
    return names


def with_adapters(model: ModelSpec, rank: int, modules: Sequence[str]) -> ModelSpec:
    """Return ``model`` frozen, with fp32 adapters of ``rank`` on ``modules`` of its blocks.

    Raises:
        ConfigError: the blocks have none of them, or a rank below one.
    """
    if rank < 1:
        raise ConfigError(f"a rank of {rank} adapts nothing; it is at least 1")
    units = tuple(_unit(unit, model.dtype, rank, modules) for unit in model.units)
    if not any(unit.trainable for unit in units):
        raise ConfigError(
            f"no block has a linear layer called {' or '.join(modules)}: experts are stored as one tensor, which PEFT "
            "does not adapt by these names; try q_proj,v_proj"
        )
    return ModelSpec(units=units, dtype="fp32")


def adapted_workload(work: Workload, model: ModelSpec) -> Workload:
    """Return ``work`` of a model without adapters as that of ``model``, which has them.

    What is frozen computes no gradient of weights, one product less in its backward; below the lowest adapter nothing
    runs backward. PEFT hands its adapters fp32 copies of their inputs, which a backward needs.
    """
    streamed = model.units[: model.num_streamed]
    bottom = next(unit.index for unit in streamed if unit.trainable)
    adapters = [2.0 * work.tokens * sum(t.numel for t in unit.tensors) for unit in streamed]
    copies = max(_copied(unit) for unit in streamed) * work.tokens
    return replace(
        work,
        forward_flops=tuple(base + more for base, more in zip(work.forward_flops, adapters, strict=True)),
        recompute_flops=tuple(
            (down if _ends_in_adapter(unit) and not work.again_flops else base) + more
            for unit, down, base, more in zip(
                streamed, work.forward_flops, work.recompute_flops, adapters, strict=True
            )
        ),
        saved_bytes=tuple(
            size + _copied(unit) * work.tokens for unit, size in zip(streamed, work.saved_bytes, strict=True)
        ),
        products_bytes=tuple(
            size + _FP32 * work.tokens * sum(t.shape[0] for t in unit.tensors)
            for unit, size in zip(streamed, work.products_bytes, strict=True)
        ),
        gradient_flops=tuple(
            (base + 2 * more) * (unit.index >= bottom)
            for unit, base, more in zip(streamed, work.forward_flops, adapters, strict=True)
        ),
        forward_workspace_bytes=_more(work.forward_workspace_bytes, copies),
        backward_workspace_bytes=_more(work.backward_workspace_bytes, copies),
    )


def frozen_parts(tensors: Sequence[TensorSpec], dtype: str) -> tuple[FrozenPart, ...]:
    """Return ``tensors`` as a part that never trains; none where there are none."""
    kind = PartKind(plane=f"frozen_{dtype}", dtype=dtype)
    return (pack_part(kind, ((t.name, t.shape) for t in tensors)),) if tensors else ()


def _unit(unit: UnitSpec, dtype: str, rank: int, modules: Sequence[str]) -> UnitSpec:
    rows = []
    for tensor in unit.tensors if unit.kind == "block" else ():
        prefix = tensor.name.removesuffix(".weight")
        if prefix == tensor.name or prefix.rpartition(".")[2] not in modules:
            continue
        out, into = tensor.shape
        rows += [
            (f"{prefix}.lora_A.weight", (rank, into), True, True),
            (f"{prefix}.lora_B.weight", (out, rank), True, True),
        ]
    return pack_unit(unit.index, unit.name, unit.kind, rows, frozen_parts(unit.tensors, dtype))


def _ends_in_adapter(unit: UnitSpec) -> bool:
    """Return whether the last product of a block is followed by that of an adapter, whose backward needs more."""
    return any(".down_proj." in tensor.name for tensor in unit.tensors)


def _copied(unit: UnitSpec) -> int:
    """Return the bytes per token of fp32 copies: what goes into the adapters of a unit, and what lies between them."""
    into = sum(max(tensor.shape) for tensor in unit.tensors if tensor.name.endswith(".lora_A.weight"))
    return _FP32 * (into + sum(min(tensor.shape) for tensor in unit.tensors))


def _more(by_kind: Mapping[str, int], num_bytes: int) -> dict[str, int]:
    return {kind: size + num_bytes * (kind == "block") for kind, size in by_kind.items()}
