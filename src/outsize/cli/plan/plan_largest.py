"""The largest models of a family that fit: more layers of the same widths, or wider layers.

Both keep everything else of a config: vocabulary, width of a head, experts, ratios. They are made-up models; what they
tell is how many parameters a machine holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outsize.cli.plan.plan_model import AskedModel
from outsize.cli.plan.plan_question import Asked
from outsize.planner.predict.feasibility import fits_at_all

# A model with more layers than this, or wider by more, is none that anyone would train.
MOST_LAYERS, WIDEST = 1024, 64
# Widths grow by eighths.
_PARTS = 8
_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)

Fits = Callable[[Mapping[str, Any]], int | None]


@dataclass(frozen=True, slots=True)
class Scaled:
    """A model made larger until it only just fits.

    Attributes:
        what: what was made larger, for people.
        layers: of the model.
        hidden: its width.
        num_parameters: of it.
    """

    what: str
    layers: int
    hidden: int
    num_parameters: int


def largest_models(asked: Asked) -> tuple[Scaled, ...]:
    """Return the largest models of the family that fit the same budgets, with microbatches of one sequence."""
    question = replace(asked.question, microbatches=asked.question.sequences)

    def fits(hf_config: Mapping[str, Any]) -> int | None:
        found = AskedModel(asked.model.path, hf_config).figures(asked.config)
        other = replace(question, model=found.spec, workload_of=found.workload_of)
        return found.spec.num_parameters if fits_at_all(other) else None

    return largest(asked.model.hf_config, fits)


def largest(config: Mapping[str, Any], fits: Fits) -> tuple[Scaled, ...]:
    """Return the largest models by layers and by widths; none of a kind of which not even the smallest fits.

    Args:
        config: of the model.
        fits: the number of parameters of the model that a config describes; None where it does not fit.
    """
    found = []
    for what, smallest, most, change in (
        ("more layers", 1, MOST_LAYERS, lambda config, layers: {**config, "num_hidden_layers": layers}),
        ("wider layers", 1, WIDEST * _PARTS, _with_widths),
    ):
        best = _last(smallest, most, partial(_parameters, config, fits, change))
        if best is not None:
            grown = change(config, best[0])
            found.append(Scaled(what, grown["num_hidden_layers"], grown["hidden_size"], best[1]))
    return tuple(found)


def _last(low: int, high: int, parameters: Callable[[int], int | None]) -> tuple[int, int] | None:
    """Return the largest size that fits, and its parameters, by bisection: what holds a size holds all below it."""
    best = parameters(low)
    if best is None:
        return None
    size, above = low, low * 2
    while above <= high and (count := parameters(above)) is not None:
        size, best, above = above, count, above * 2
    above = min(above, high + 1)
    while above - size > max(1, size // 32):
        middle = (size + above) // 2
        count = parameters(middle)
        if count is None:
            above = middle
        else:
            size, best = middle, count
    return size, best


def _parameters(
    config: Mapping[str, Any],
    fits: Fits,
    change: Callable[[Mapping[str, Any], int], Mapping[str, Any]],
    size: int,
) -> int | None:
    return fits(change(config, size))


def _with_widths(config: Mapping[str, Any], eighths: int) -> dict[str, Any]:
    """Return the config with widths of so many eighths; heads stay as wide as they are."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    grown = {key: max(1, round(config[key] * eighths / _PARTS)) for key in _WIDTHS if config.get(key)}
    return {**config, **grown, "head_dim": head_dim}
