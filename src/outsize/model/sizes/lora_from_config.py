"""LoRA adapters beside a model whose sizes its config tells: their parameters, operations and memory. No torch.

What PEFT's `LoraConfig` does to a linear layer of ``out`` times ``in``: two matrices beside it, ``r`` times ``in`` and
``out`` times ``r``, in fp32, and the layer itself frozen. A trained run has its adapters made by PEFT
(`model.adapters`); this is for asking about models that are not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import prod

from outsize.errors import ConfigError
from outsize.model.sizes.model_spec import (
    ITEMSIZE,
    FrozenPart,
    ModelSpec,
    PartKind,
    TensorSpec,
    UnitSpec,
    Workload,
    pack_part,
    pack_unit,
)
from outsize.model.sizes.spec_from_config import Shape

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


def with_adapters(
    model: ModelSpec, rank: int, modules: Sequence[str], parameters: Sequence[str] = ()
) -> ModelSpec:
    """Return ``model`` frozen, with fp32 adapters of ``rank`` on ``modules`` of its blocks, and on ``parameters``.

    Raises:
        ConfigError: the blocks have none of them, or a rank below one.
    """
    if rank < 1:
        raise ConfigError(f"a rank of {rank} adapts nothing; it is at least 1")
    stacks = {tensor.name for unit in model.units for tensor in unit.tensors if len(tensor.shape) == 3}
    missed = [name for name in parameters if not any(_is_called(stack, [name]) for stack in stacks)]
    if missed:
        names = sorted({".".join(stack.split(".")[-2:]) for stack in stacks})
        raise ConfigError(
            f"lora.target_parameters: no parameter is called {missed[0]}; the stacked experts of this model are "
            f"{', '.join(names) or 'none'}"
        )
    units = tuple(_unit(unit, model.dtype, rank, modules, parameters) for unit in model.units)
    if not any(unit.trainable for unit in units):
        raise ConfigError(
            f"no block has a linear layer called {' or '.join(modules)}: experts are stored as one tensor, which PEFT "
            "does not adapt by these names; try q_proj,v_proj, or lora.target_parameters for experts"
        )
    return ModelSpec(units=units, dtype="fp32")


def with_frozen(shape: Shape, model: ModelSpec) -> Shape:
    """Return ``shape`` as that of ``model``, which is frozen and has adapters."""
    names = [tensor.name for unit in model.units for tensor in unit.tensors]
    gate_up, down = (
        any(f".experts.{stack}_proj." in name for name in names) for stack in ("gate_up", "down")
    )
    return replace(shape, trains=False, gate_up_trains=gate_up, down_trains=down)


def adapted_workload(work: Workload, model: ModelSpec) -> Workload:
    """Return ``work`` of a model without adapters as that of ``model``, which has them.

    What is frozen computes no gradient of weights, one product less in its backward, but for attention, which has no
    weights; below the lowest adapter nothing runs backward. PEFT hands its adapters fp32 copies of their inputs, which
    a backward needs. To a stack of experts that has an adapter each call adds it, and a backward makes the gradient of
    the sum.
    """
    streamed = model.units[: model.num_streamed]
    bottom = next(unit.index for unit in streamed if unit.trainable)
    of_tokens = [[t for t in unit.tensors if ".experts." not in t.name] for unit in streamed]
    stacks = [_adapted_stacks(unit) for unit in streamed]
    adapters = [
        2.0 * work.tokens * sum(t.numel for t in tensors) + sum(2.0 * rank * size for rank, size in stacked)
        for tensors, stacked in zip(of_tokens, stacks, strict=True)
    ]
    # Stacks of experts with their adapters added.
    sums = [sum(size for _, size in stacked) * ITEMSIZE[model.compute_dtype] for stacked in stacks]
    copied = [_copied(tensors, model.compute_dtype) * work.tokens for tensors in of_tokens]
    shares = [
        sum(size for _, size in stacked) / max(1, sum(map(prod, _stack_shapes(unit).values())))
        for unit, stacked in zip(streamed, stacks, strict=True)
    ]
    routed = work.routed_flops or (0.0,) * len(streamed)
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
            size + copies + added * (not work.again_flops)
            for copies, added, size in zip(copied, sums, work.saved_bytes, strict=True)
        ),
        products_bytes=tuple(
            size + _FP32 * work.tokens * sum(t.shape[0] for t in tensors)
            for tensors, size in zip(of_tokens, work.products_bytes, strict=True)
        ),
        gradient_flops=tuple(
            (base + attention + 2 * more + visited * share) * (unit.index >= bottom)
            for unit, base, attention, more, visited, share in zip(
                streamed, work.forward_flops, work.attention_flops, adapters, routed, shares, strict=True
            )
        ),
        forward_workspace_bytes={
            **work.forward_workspace_bytes,
            "block": max(work.forward_workspace_bytes["block"], work.experts_forward_bytes + max(sums)),
        },
        backward_workspace_bytes=_more(work.backward_workspace_bytes, max(copied) + max(sums)),
    )


def frozen_parts(tensors: Sequence[TensorSpec], dtype: str) -> tuple[FrozenPart, ...]:
    """Return ``tensors`` as a part that never trains; none where there are none."""
    kind = PartKind(plane=f"frozen_{dtype}", dtype=dtype)
    return (pack_part(kind, ((t.name, t.shape) for t in tensors)),) if tensors else ()


def _is_called(name: str, ends: Sequence[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)


def _unit(
    unit: UnitSpec, dtype: str, rank: int, modules: Sequence[str], parameters: Sequence[str]
) -> UnitSpec:
    rows = []
    for tensor in unit.tensors if unit.kind == "block" else ():
        if len(tensor.shape) == 3 and _is_called(tensor.name, parameters):
            experts, out, into = tensor.shape
            rows += [
                (f"{tensor.name}.lora_A.weight", (rank * experts, into), True, True),
                (f"{tensor.name}.lora_B.weight", (out, rank * experts), True, True),
            ]
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


def _adapted_stacks(unit: UnitSpec) -> list[tuple[int, int]]:
    """Return of each stack of experts with an adapter its rank, and how many elements it has."""
    shapes = _stack_shapes(unit)
    ranks = {t.name.removesuffix(".lora_A.weight"): t.shape[0] for t in unit.tensors}
    return [(ranks[name] // shape[0], prod(shape)) for name, shape in shapes.items() if name in ranks]


def _stack_shapes(unit: UnitSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each stack of experts of a block whose own parameters are frozen, by its name."""
    return {t.name: t.shape for part in unit.frozen for t in part.tensors if len(t.shape) == 3}


# What goes into linear layers, by what they share it with; attention keeps what it returns anyhow.
_SHARED = dict(zip(MODULES, ("qkv", "qkv", "qkv", None, "gate_up", "gate_up", "down"), strict=True))


def _copied(tensors: Sequence[TensorSpec], dtype: str) -> int:
    """Return the bytes per token of what goes into adapters of a unit, and of what lies between them, in fp32.

    Of a model in fp32 that is no copy, and adapters of several layers share it.
    """
    into = {tensor.name.split(".")[-3]: max(tensor.shape) for tensor in tensors if ".lora_A." in tensor.name}
    if dtype == "fp32":
        into = {shared: size for module, size in into.items() if (shared := _SHARED[module])}
    return _FP32 * (sum(into.values()) + sum(min(tensor.shape) for tensor in tensors))


def _more(by_kind: Mapping[str, int], num_bytes: int) -> dict[str, int]:
    return {kind: size + num_bytes * (kind == "block") for kind, size in by_kind.items()}
