"""Carry optimizer state through torch's ``load_state_dict``, which rounds what lies beside 16-bit weights."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from outsize.optim.optimizer_spec import MASTER

_log = logging.getLogger(__name__)
STEP = "step"
# Beside the numbers of the parameters in a ``state_dict``: what torch's ``load_state_dict`` leaves as it is.
EXACT = "outsize"


def pack(optimizer: torch.optim.Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
    """Return a ``state_dict`` from which torch's ``load_state_dict`` loses nothing.

    It rounds the state of a parameter to the dtype of that, masters as well. What it would change stands under `EXACT`
    as well, by number and key; files hold a tensor once.

    Args:
        optimizer: any.
        packed: what torch's ``state_dict`` made of it.
    """
    if EXACT in packed["state"]:  # loaded, and not stepped since
        return packed
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: dict(values) for number, values in packed["state"].items()}
    exact = {
        f"{number}.{key}": value
        for number, values in state.items()
        for key, value in values.items()
        if key != STEP and value.dtype != parameters[number].dtype
    }
    return {**packed, "state": {**state, EXACT: exact} if exact else state}


def before_rounding(
    state: Mapping[Any, Any], parameters: Iterable[Tensor]
) -> dict[Tensor, dict[str, Tensor]]:
    """Return the state of each parameter that has one, as `pack` packed it where it is that, rounded.

    Args:
        state: of an optimizer, perhaps as torch's ``load_state_dict`` left it.
        parameters: of the optimizer, in order.
    """
    exact, loaded = state.get(EXACT, {}), {}
    for number, parameter in enumerate(parameters):
        if parameter in state:
            loaded[parameter] = values = dict(state[parameter])
            for key, value in values.items():
                unrounded = exact.get(f"{number}.{key}")
                if unrounded is not None and torch.equal(unrounded.to(value), value):
                    values[key] = unrounded
    rounded = [v[MASTER].dtype for v in loaded.values() if MASTER in v and v[MASTER].dtype != torch.float32]
    if rounded:
        _log.warning(
            "masters and moments that were loaded are in %s, as torch.optim.AdamW.load_state_dict rounds them: this "
            "run goes on from those, and not bit for bit; go on from what outsize.AdamW saved with outsize.AdamW",
            str(rounded[0]).removeprefix("torch."),
        )
    return loaded
