"""The largest model that fits with more layers, all of the widths and in the order of the layers that a model has.

It is a made-up model; what it tells is how many parameters a machine holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from outsize.cli.plan.plan_question import Asked
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.planner.predict.feasibility import fits_at_all

# A model with more layers than this is none that anyone would train.
MOST_LAYERS = 1024


@dataclass(frozen=True, slots=True)
class Scaled:
    """A model made larger until it only just fits.

    Attributes:
        what: what was made larger, for people.
        layers: of the model.
        num_parameters: of it.
    """

    what: str
    layers: int
    num_parameters: int


def largest_models(asked: Asked) -> tuple[Scaled, ...]:
    """Return the largest model that fits the same budgets, with microbatches of one sequence; none where none fits."""
    question = replace(asked.question, microbatches=asked.question.sequences)
    if not any(unit.kind == "block" for unit in question.model.units):
        return ()

    workload_of = question.workload_of
    assert workload_of is not None

    def parameters(layers: int) -> int | None:
        spec = with_layers(question.model, layers)
        other = replace(
            question,
            model=spec,
            workload_of=lambda count: _of_layers(question.model, workload_of(count), layers),
        )
        return spec.num_parameters if fits_at_all(other) else None

    best = last_that_fits(MOST_LAYERS, parameters)
    return () if best is None else (Scaled("more layers", *best),)


def last_that_fits(high: int, parameters: Callable[[int], int | None]) -> tuple[int, int] | None:
    """Return the largest size that fits, and its parameters, by bisection: what holds a size holds all below it."""
    best = parameters(1)
    if best is None:
        return None
    size, above = 1, 2
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


def with_layers(model: ModelSpec, layers: int) -> ModelSpec:
    """Return ``model`` with so many blocks, which are its own by turns."""
    units = _by_turns(model, model.units, layers)
    return replace(model, units=tuple(replace(unit, index=index) for index, unit in enumerate(units)))


def _of_layers(model: ModelSpec, work: Workload, layers: int) -> Workload:
    """Return ``work``, of ``model``, as that of the same with so many blocks."""
    by_unit = {field.name: getattr(work, field.name) for field in fields(Workload)}
    changed: dict[str, Any] = {
        name: _by_turns(model, values, layers)
        for name, values in by_unit.items()
        if isinstance(values, tuple) and values
    }
    return replace(work, **changed)


def _by_turns(model: ModelSpec, values: Sequence[Any], layers: int) -> tuple[Any, ...]:
    """Return ``values``, one for each unit, with those of as many blocks."""
    blocks = [unit.index for unit in model.units if unit.kind == "block"]
    first, behind = blocks[0], blocks[-1] + 1
    turns = (values[blocks[layer % len(blocks)]] for layer in range(layers))
    return (*values[:first], *turns, *values[behind:])
