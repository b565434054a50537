"""Steps of the optimizer over tiles of a unit: clipping, and the step itself."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from outsize import native
from outsize.compat.torch_private import norms
from outsize.model.sizes.model_spec import UnitSpec
from outsize.optim import split_masters
from outsize.optim.adamw import check_range, pieces_of
from outsize.optim.optimizer_names import factored
from outsize.optim.optimizer_spec import MASTER, UPDATE_TILE_ELEMENTS, WEIGHTS
from outsize.optim.planes import StatePlanes, Update, UpdateRule, WholeParameter, WholeRule, chance_key
from outsize.optim.split_masters import join_master, split_master


@torch.no_grad()
def gradient_norms(unit: UnitSpec, gradient: Tensor) -> Tensor:
    """Return the L2 norm of each tensor of a unit, in the order of ``unit.tensors``.

    Args:
        unit: the unit.
        gradient: its whole fp32 gradient plane, on any device.

    Returns:
        fp32 tensor of ``len(unit.tensors)`` norms, on the gradient's device.

    Raises:
        ValueError: the plane has another size.
    """
    if gradient.shape != (unit.numel,):
        raise ValueError(
            f"{unit.name}: need a gradient of {unit.numel} elements, not {tuple(gradient.shape)}"
        )
    if not unit.tensors:
        return gradient.new_empty(0)
    views = [gradient[t.offset : t.offset + t.numel].view(t.shape) for t in unit.tensors]
    return norms(views)


@torch.no_grad()
def clip_coefficient(norms: Sequence[Tensor], max_norm: float) -> tuple[Tensor, Tensor]:
    """Return the global norm and the factor that clips it to ``max_norm``.

    Bit for bit ``torch.nn.utils.clip_grad_norm_`` over separate parameters: the norm of each parameter's gradient,
    taken by `gradient_norms` unit by unit, where each lies, and then the norm of these norms, in the order of
    ``model.parameters()``.

    Args:
        norms: one fp32 scalar per parameter that got a gradient, in the order of ``model.parameters()``.
        max_norm: largest norm that is left alone, above 0.

    Returns:
        Two fp32 scalars on the device of the first norm: the norm before clipping, and a coefficient of at
        most 1. Where the norm is not finite, the caller must not use the coefficient.

    Raises:
        ValueError: ``max_norm`` is not a positive number.
    """
    if not max_norm > 0.0:
        raise ValueError(f"max_norm must be above 0, not {max_norm}")
    if not norms:
        return torch.tensor(0.0), torch.tensor(1.0)
    device = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms]), 2.0)
    # 1e-6 keeps a zero norm from dividing, as in torch.nn.utils.clip_grads_with_norm_.
    return total, torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)


# In torch ops a piece is stepped in tiles. What has to be unpacked stays in a cache: 512 KiB of fp32 for each of four
# tensors, and what a class of torch makes op by op. Of planes that lie as they step only the gradient is copied, and
# long tiles spare threads their meetings.
_TILE_ELEMENTS, _PLAIN_TILE_ELEMENTS = 2**17, 2**21


@torch.no_grad()
def step_state(
    rule: UpdateRule,
    unit: UnitSpec,
    planes: StatePlanes,
    gradient: Tensor,
    *,
    start: int,
    step: int | Mapping[str, int],
    lr: float,
    clip_coefficient: Tensor | None = None,
    skip: AbstractSet[str] = frozenset(),
    seed: int = 0,
) -> None:
    """Step elements of a unit in place, from ``start`` on, as many as ``planes`` hold.

    Planes are whatever a home keeps: split or separate masters, moments in fp32 or fewer bits. With moments in fp32 a
    step is bit for bit that of torch's own AdamW with ``fused=True`` on fp32 masters, or of a class of torch, followed
    by their cast to the weights. With fewer bits of moments or masters the arithmetic is still fp32, and what is kept
    is rounded as `outsize.optim.split_masters` says. The kernel in C and torch ops give the same bits.

    Parameters that are frozen or skipped, and the padding between parameters, keep what they have.

    Args:
        rule: the optimizer.
        unit: whose parameters they are.
        planes: of the elements, with as many moments as the optimizer has.
        gradient: fp32 or bf16, of the same elements; on the host it is left as it is, else spent.
        start: first element, a multiple of 2048.
        step: how often each parameter has been stepped, this step included: one number, or one by parameter name.
        lr: learning rate of parameters whose factor is 1.
        clip_coefficient: factor of the gradient; None for 1.
        skip: names of parameters that got no gradient.
        seed: of the chances by which fewer bits are rounded.

    Raises:
        ValueError: planes or a gradient that do not fit the unit, the optimizer or one another.
    """
    stop = start + planes.numel
    check_range(unit, start, stop, lr)
    if gradient.shape != (planes.numel,) or gradient.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"need a gradient of {planes.numel} fp32 or bf16, not {gradient.dtype} {list(gradient.shape)}"
        )
    if planes.num_moments != rule.num_moments:
        raise ValueError(f"need planes of {rule.num_moments} moments, not {planes.num_moments}")
    for piece in pieces_of(unit, start, stop, step, skip):
        update = Update(
            lr=lr * piece.lr_scale,
            count=piece.count,
            decay=piece.decay,
            clip=1.0 if clip_coefficient is None else float(clip_coefficient),
            first=start + piece.start,
            key=chance_key(seed, unit.index, piece.count),
        )
        step_piece(rule, update, planes.cut(piece.start, piece.stop), gradient[piece.start : piece.stop])


def step_piece(rule: UpdateRule, update: Update, planes: StatePlanes, gradient: Tensor) -> None:
    """Step parameters that touch and step alike, whole or up to a multiple of 16 elements; see `step_state`."""
    on_host = planes.weights.device.type == "cpu"
    done = rule.step_native(update, planes, gradient) if on_host and native.available() else 0
    plain = planes.master_low is None and planes.moments == "fp32" and not planes.others
    length = _PLAIN_TILE_ELEMENTS if plain else _TILE_ELEMENTS
    length = length if on_host else UPDATE_TILE_ELEMENTS
    for first in range(done, planes.numel, length):
        stop = min(first + length, planes.numel)
        _step_tile(rule, update, planes.cut(first, stop), gradient[first:stop], update.first + first)


@torch.no_grad()
def step_whole(
    rule: WholeRule,
    unit: UnitSpec,
    planes: Mapping[str, Tensor],
    scratches: Sequence[Tensor],
    *,
    step: Mapping[str, int],
    lr: float,
    clip_coefficient: Tensor | None = None,
    skip: AbstractSet[str] = frozenset(),
    rounds: bool = True,
    seed: int = 0,
) -> None:
    """Step all parameters of a unit in place; frozen and skipped ones keep what they have. The gradient is spent.

    Args:
        rule: the optimizer.
        unit: whose parameters they are.
        planes: of the whole unit, by name, gradient included: fp32 or bf16.
        scratches: as many, and as long, as `StateLayout` says, fp32; what they hold is lost.
        step: how often each parameter has been stepped, this step included.
        lr: learning rate of parameters whose factor is 1.
        clip_coefficient: factor of the gradient; None for 1.
        skip: names of parameters that got no gradient.
        rounds: whether weights beside a separate master are made of it.
        seed: of the chances by which fewer bits are rounded.
    """
    if MASTER in planes and not rounds:  # then it steps as weights that are their own masters
        planes = {name: planes[MASTER if name == WEIGHTS else name] for name in planes if name != MASTER}
    tensors_by_factor = {
        factor: {t.name: t for t in factored(unit, factor).tensors} for factor in rule.factors
    }
    for tensor in unit.tensors:
        if not tensor.trainable or tensor.name in skip or not tensor.numel:
            continue
        update = Update(
            lr=lr * tensor.lr_scale,
            count=step[tensor.name],
            decay=tensor.decay,
            clip=1.0 if clip_coefficient is None else float(clip_coefficient),
            first=tensor.offset,
            key=chance_key(seed, unit.index, step[tensor.name]),
        )
        has = {
            factor: tensors[tensor.name]
            for factor, tensors in tensors_by_factor.items()
            if tensor.name in tensors
        }
        rule.step_parameter(WholeParameter(tensor, planes, scratches, has, unit.index), update)


def _step_tile(rule: UpdateRule, update: Update, planes: StatePlanes, gradient: Tensor, first: int) -> None:
    """Step a tile in torch ops, beginning at element ``first`` of its unit."""
    master = planes.master
    if planes.master_low is not None:
        master = torch.empty(planes.numel, device=planes.weights.device)
        join_master(planes.weights, planes.master_low, planes.master_ties, master)
    elif master is None:
        master = planes.weights
    exact = planes.moments == "fp32"
    state = unpacked(planes)
    # On a device the gradient is as long as the planes are, and spent by the step.
    clipped = gradient.to(torch.float32, copy=gradient.device.type == "cpu")
    if update.clip != 1.0:
        clipped *= update.clip
    rule.update(update, master, clipped, state, exact=exact)
    if not exact:
        pack(planes, state, split_masters.chances(first, update.key, planes.numel))
    if planes.master_low is not None:
        split_master(master, planes.weights, planes.master_low, planes.master_ties, first, update.key)
    elif planes.master is not None:
        planes.weights.copy_(master)


def unpacked(planes: StatePlanes) -> tuple[Tensor, ...]:
    """Return the moments in fp32, the planes themselves where they are, and what is kept in their place."""
    values = []
    for plane, scales, form in _moments(planes):
        if scales is not None:
            values.append(split_masters.from_codes(plane, scales, form))
        else:
            values.append(plane.to(torch.float32))
    return (*values, *planes.others.values())


def pack(planes: StatePlanes, state: tuple[Tensor, ...], chance: Tensor) -> None:
    """Keep moments: the first goes by the lower 16 bits of the chances, the second by the upper ones."""
    chances_by_moment = zip(state, _moments(planes), split_masters.halves(chance), strict=False)
    for values, (plane, scales, form), part in chances_by_moment:
        if scales is not None:
            split_masters.to_codes(values, part, form, plane, scales)
        else:
            plane.copy_(split_masters.to_bf16(values, part))


def _moments(planes: StatePlanes) -> list[tuple[Tensor, Tensor | None, tuple[int, bool]]]:
    both = (
        (planes.exp_avg, planes.exp_avg_scales, split_masters.EXP_AVG_FORM),
        (planes.exp_avg_sq, planes.exp_avg_sq_scales, split_masters.EXP_AVG_SQ_FORM),
    )
    return [(plane, scales, form) for plane, scales, form in both if plane is not None]
