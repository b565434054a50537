"""The same question over a range: tokens per second by tokens per step, length of a sequence, GPUs or host memory."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal
from xml.sax.saxutils import escape

from outsize.cli.plan.plan_model import AskedModel, ModelFigures
from outsize.cli.plan.plan_options import PlanFlags
from outsize.cli.plan.plan_question import Asked, ask, ask_what_fits, asked_model, in_options
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.hardware.cards import split_count
from outsize.planner.predict.prediction import fastest
from outsize.units import format_count, format_seconds

Sweep = Literal["tokens-per-step", "seq-len", "gpus", "ram"]

GPUS = (1, 2, 4, 8)
RAM_GIB = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SHORTEST, LONGEST = 512, 131072
# Tokens per step, as shares of what was asked about.
SHARES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 2, 4)
BAR = 36
_ROW_PX, _LEFT_PX, _BAR_PX = 26, 150, 420


@dataclass(frozen=True, slots=True)
class Point:
    """One answer of a sweep.

    Attributes:
        value: that was asked about, for people.
        tokens_per_s: predicted; None where nothing fits.
        step_s: of a step.
        home: where the training state rests.
        ends_it: what ends the step, or why there is none.
    """

    value: str
    tokens_per_s: float | None
    step_s: float | None
    home: str | None
    ends_it: str


def sweep(options: PlanFlags, kind: Sweep) -> tuple[Point, ...]:
    """Return the answers over the range of ``kind``.

    Raises:
        ConfigError: GPUs that have no number, or nothing of the range can be asked about.
        ModelError: no model there, or none that can be planned.
    """
    model = asked_model(options)
    figures: ModelFigures | None = None
    points = []
    for value, changed in _changes(options, model, kind):
        try:
            request = ask(changed, model, figures)
            figures = None if kind == "seq-len" else request.figures
            points.append(_point(value, request))
        except InfeasiblePlanError as error:
            points.append(Point(value, None, None, None, in_options(str(error))))
    if not points:
        raise ConfigError(
            f"--sweep {kind}: there is nothing between the least and the most that could be asked"
        )
    return tuple(points)


def _point(value: str, request: Asked) -> Point:
    decision = fastest(request.question)
    ends_it = decision.ends_it.partition(":")[0]
    return Point(value, decision.tokens_per_s, decision.step_s, decision.home, ends_it)


def _changes(options: PlanFlags, model: AskedModel, kind: Sweep) -> Iterator[tuple[str, PlanFlags]]:
    """Yield what is asked about, in words and as options."""
    if kind == "gpus":
        if options.gpus is None:
            raise ConfigError("--sweep gpus: name them with --gpus, whose number is then varied")
        count, name = split_count(options.gpus)
        for number in sorted({*GPUS, count}):
            yield f"{number}x{name}", replace(options, gpus=f"{number}x{name}")
    elif kind == "ram":
        for gib in RAM_GIB:
            yield f"{gib} GiB", replace(options, ram=f"{gib}GiB")
    elif kind == "seq-len":
        longest = min(model.positions or LONGEST, LONGEST)
        tokens = options.tokens_per_step or longest
        for length in _doubled(SHORTEST, longest):
            whole_tokens = max(1, tokens // length) * length
            yield f"{length:,}", replace(options, seq_len=length, tokens_per_step=whole_tokens)
    else:
        question = ask_what_fits(options).question
        for sequences in sorted({max(1, round(question.sequences * share)) for share in SHARES}):
            tokens = sequences * question.seq_len * question.nodes
            yield f"{tokens:,}", replace(options, tokens_per_step=tokens)


def _doubled(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def to_dict(kind: Sweep, points: Sequence[Point]) -> dict[str, Any]:
    """Return the sweep in what JSON knows."""
    return {"kind": "sweep", "over": kind, "points": [asdict(point) for point in points]}


def render(kind: Sweep, points: Sequence[Point]) -> str:
    """Return the sweep as a table with bars."""
    most = max((point.tokens_per_s or 0.0 for point in points), default=0.0) or 1.0
    wide = max(len(kind), *(len(point.value) for point in points))
    lines = [f"{kind:>{wide}}   tokens/s"]
    for point in points:
        if point.tokens_per_s is None:
            lines.append(f"{point.value:>{wide}}    no plan   {point.ends_it.partition(';')[0]}")
            continue
        assert point.step_s is not None
        bar = "█" * max(1, round(BAR * point.tokens_per_s / most))
        step = f"{format_seconds(point.step_s)} a step, home on {point.home}, {point.ends_it}"
        lines.append(f"{point.value:>{wide}} {point.tokens_per_s:>10,.0f}   {bar:<{BAR}} {step}")
    return "\n".join(lines)


def to_svg(title: str, kind: Sweep, points: Sequence[Point]) -> str:
    """Return the sweep as a picture that needs nothing but itself."""
    most = max((point.tokens_per_s or 0.0 for point in points), default=0.0) or 1.0
    height = _ROW_PX * (len(points) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT_PX + _BAR_PX + 130}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f'<text x="8" y="18" font-weight="bold">{escape(title)}: tokens per second by {kind}, predicted</text>',
    ]
    for row, point in enumerate(points, 1):
        y = row * _ROW_PX + 18
        parts.append(f'<text x="{_LEFT_PX - 8}" y="{y}" text-anchor="end">{escape(point.value)}</text>')
        if point.tokens_per_s is None:
            parts.append(f'<text x="{_LEFT_PX}" y="{y}" fill="#a33">does not fit</text>')
            continue
        width = max(1.0, _BAR_PX * point.tokens_per_s / most)
        color = "#3572b0" if point.home == "host" else "#c98a2b"
        parts.append(f'<rect x="{_LEFT_PX}" y="{y - 13}" width="{width:.1f}" height="17" fill="{color}"/>')
        label = f"{format_count(point.tokens_per_s)} ({point.home})"
        parts.append(f'<text x="{_LEFT_PX + width + 6:.1f}" y="{y}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])
