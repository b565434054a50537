"""Clipping by the global norm, for gradients that rest at home."""

import math

import torch
from torch import Tensor, nn

from outsize.errors import NonFiniteError
from outsize.optim.optimizer_spec import GRADIENT
from outsize.optim.step import clip_coefficient, gradient_norms
from outsize.storage.ledger import Arena
from outsize.wrapped.module import iterate_parameters, runner_of
from outsize.wrapped.runner import Runner


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False) -> Tensor:
    """Clip the gradients of a wrapped model to a global L2 norm: bit for bit `torch.nn.utils.clip_grad_norm_`.

    With `outsize.AdamW` gradients are multiplied in its step, unit by unit; else at once.

    Args:
        model: the wrapped model.
        max_norm: largest norm that is left alone, above 0; infinity only takes the norm.
        error_if_nonfinite: whether a norm that is not finite raises.

    Returns:
        The norm before clipping, an fp32 scalar.

    Raises:
        ConfigError: the model is not wrapped.
        NonFiniteError: see ``error_if_nonfinite``; no gradient has changed.
    """
    runner = runner_of(model)
    held = runner.held()
    runner.parameters.multiply_gradients(list(runner.parameters.factors))
    norms = _norms(runner, held)
    order = {id(parameter): index for index, parameter in enumerate(iterate_parameters(model))}
    ordered = sorted(norms, key=lambda pair: order[id(runner.parameters.named[pair[0]])])
    total, coefficient = clip_coefficient([norm for _, norm in ordered], max_norm)
    if runner.records is not None:
        runner.records.clipped(total)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise NonFiniteError(f"the gradient norm is {total.item():g}; no gradient was changed")
    if math.isfinite(max_norm):
        runner.parameters.factors.update((name, coefficient) for name, _ in norms)
    if runner.optimizer is None:
        runner.parameters.multiply_gradients(name for name, _ in norms)
    return total


def _norms(runner: Runner, held: dict[int, frozenset[int]]) -> list[tuple[str, Tensor]]:
    """Name and norm of each gradient at home."""
    found: list[tuple[str, Tensor]] = []
    home = runner.session.home
    for index, positions in held.items():
        if not positions:
            continue
        unit = runner.split.spec.units[index]
        with Arena() as arena:
            plane = home.lend(index, GRADIENT)
            if plane is None:
                plane = arena.take(unit.numel * 4, GRADIENT).view(torch.float32)
                home.read(index, GRADIENT, 0, plane)
            norms = gradient_norms(unit, plane)
        found += [(unit.tensors[position].name, norms[position]) for position in sorted(positions)]
    return found
