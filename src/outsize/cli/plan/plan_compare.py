"""Compare a prediction with other ways to train, and with larger models."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from rich.table import Table

from outsize.cli.plan.plan_question import Asked
from outsize.cli.text.console import as_text
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.planner.predict.alternatives import ACTIVATION_SUMS, Alternative, managed_tokens_per_s
from outsize.planner.predict.prediction import Prediction
from outsize.planner.predict.question import fits_at_all
from outsize.units import format_bytes

# Of a step: what waits longer is warned of.
MUCH = 0.1
# What another way has to gain at most, to be the better choice.
CLEAR = 0.05


def to_dict(request: Asked, prediction: Prediction, alternatives: Sequence[Alternative]) -> dict[str, Any]:
    """Return the comparison in what JSON knows."""
    return {
        "choice": choice(prediction, alternatives),
        "other_ways": [asdict(way) for way in alternatives],
        "managed_memory_tokens_per_s": managed_tokens_per_s(request.machines),
        "warnings": warnings(request, alternatives),
    }


def render(request: Asked, prediction: Prediction, alternatives: Sequence[Alternative]) -> str:
    """Return the comparison for people."""
    count = request.machines.nodes
    here = "this machine" if count == 1 else f"these {count} machines"
    table = Table(title=f"other ways on {here}, at most", title_justify="left", box=None, pad_edge=False)
    for heading in ("", "each GPU", "host", "tokens/s", "of ours", ""):
        table.add_column(heading, justify="left" if not heading else "right", overflow="fold")
    device, host = (prediction.total_bytes(tier) for tier in ("device", "host"))
    host *= request.question.nodes // count
    table.add_row(
        "outsize, predicted",
        format_bytes(device),
        format_bytes(host),
        f"{prediction.tokens_per_s:,.0f}",
        "1.00",
        "",
    )
    for way in alternatives:
        speed = f"{way.tokens_per_s:,.0f}" if way.fits else "-"
        ratio = f"{way.tokens_per_s / prediction.tokens_per_s:.2f}" if way.fits else "-"
        where = format_bytes(way.host_bytes) if way.host_bytes else ""
        table.add_row(way.name, format_bytes(way.device_bytes), where, speed, ratio, _remark(way))
    return as_text(table, *warnings(request, alternatives), choice(prediction, alternatives))


def choice(prediction: Prediction, alternatives: Sequence[Alternative]) -> str:
    """Return what to choose, and why, in a line."""
    fitting = [way for way in alternatives if way.fits]
    if not fitting:
        return "so: outsize, since no other way fits"
    best = max(fitting, key=lambda way: way.tokens_per_s)
    times = best.tokens_per_s / prediction.tokens_per_s
    gain = times - 1
    if gain < CLEAR:
        most = f"gains {gain:.0%} at most" if gain > 0 else f"is {-gain:.0%} slower even at its bound"
        return f"so: outsize, since {best.name}, the fastest of those that fit, {most}"
    return f"so: {best.name}, since it fits and is up to {times:.2f} times as fast: its bound, beside our prediction"


def _remark(way: Alternative) -> str:
    if not way.fits:
        return "does not fit"
    waits = _waits(way)
    return f"waits {waits:.0%} of a step, most for {way.waits_for}" if waits >= MUCH else ""


def _waits(way: Alternative) -> float:
    """Return the share of a step in which nothing computes."""
    return way.waits_s / (way.compute_s + way.waits_s)


def warnings(request: Asked, alternatives: Sequence[Alternative]) -> list[str]:
    """Return what to say of ways that PCIe does not suit."""
    sums = [_waits(way) for way in alternatives if way.waits_for == ACTIVATION_SUMS]
    lines = []
    if sums and max(sums) >= MUCH:
        lines.append(
            f"warning: tensor parallelism sums activations in every block while nothing computes: at least "
            f"{max(sums):.0%} of a step on these links; it is made for GPUs of one machine with a wire of their own "
            "(NVLink)"
        )
    lines.append(
        "note: managed (unified) memory loads a page when a kernel faults on it, so nothing is loaded ahead: "
        f"at most {managed_tokens_per_s(request.machines):,.0f} tokens/s here, if faults were free; PyTorch does not "
        "offer it"
    )
    return lines


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


def largest_models(request: Asked) -> tuple[Scaled, ...]:
    """Return the largest model that fits the same budgets, with microbatches of one sequence; none where none fits.

    It has more layers, all of the widths and in the order of the layers that the model has. It is a made-up model: it
    tells how many parameters a machine holds.
    """
    question = replace(request.question, microbatches=request.question.sequences)
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
