"""A prediction for people, as tables, and for machines, as one object."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from outsize.cli.plan.plan_compare import Scaled
from outsize.cli.plan.plan_question import Asked, in_options
from outsize.cli.text.console import as_text
from outsize.hardware.cards import COMPILED, LIGER, NVME
from outsize.hardware.topology import slower_than_fp32
from outsize.planner.predict.prediction import ALWAYS, Prediction, UsedFigure, figures_used
from outsize.planner.predict.what_if import LEAST_GAIN, Outcome, host_refusal
from outsize.units import format_bytes, format_count, format_rate, format_seconds

Outcomes = Sequence[Outcome]
# How often vendors warrant that a consumer's SSD can be written whole: 600 TB of each TB.
SSD_WRITES = 600


def to_dict(
    request: Asked, prediction: Prediction, outcomes: Outcomes, helps: Outcomes, scaled: Sequence[Scaled] = ()
) -> dict[str, Any]:
    """Return everything that is known, in what JSON knows."""
    question, gpu = request.question, request.question.machine.gpus[0]
    fused = gpu.fused and not gpu.efficiency.source.startswith(COMPILED)
    named = request.config.model.kernels
    return {
        "kind": "prediction",
        "model": request.name,
        "num_parameters": question.model.num_parameters,
        "num_trainable": question.model.num_trainable,
        "method": request.config.train.method,
        "machine": question.machine.name,
        "nodes": question.nodes,
        "dtype": question.model.compute_dtype,
        "kernels": named if named != "none" else "fused" if fused else "eager",
        "compile": request.config.model.compile,
        "seq_len": question.seq_len,
        "tokens_per_step": question.tokens_per_step,
        "verdict": "fits",
        "budget_bytes": asdict(question.budgets),
        **prediction.to_dict(),
        "why_on_disk": _why_on_disk(request, prediction),
        "tokens_by": request.note,
        "what_if": [_outcome_dict(outcome) for outcome in outcomes],
        "what_would_help": [_outcome_dict(outcome) for outcome in helps],
        "largest": [asdict(model) for model in scaled],
        "assumptions": [*ALWAYS, *_notes(request), *_small_rounds(prediction), *prediction.assumptions],
        "figures": [asdict(figure) for figure in figures_used(question, prediction)],
    }


def render_short(
    request: Asked, prediction: Prediction, outcomes: Outcomes, helps: Outcomes, scaled: Sequence[Scaled] = ()
) -> str:
    """Return what somebody wants to know first, in some ten lines, and what was asked for besides."""
    question = request.question
    tiers = [
        f"{format_bytes(prediction.total_bytes(tier))} of {format_bytes(budget)} {where}"
        for tier, where in (("device", "on each GPU"), ("host", "in host memory"), ("disk", "on disk"))
        if prediction.total_bytes(tier) and (budget := getattr(question.budgets, tier)) is not None
    ]
    home = "in host memory" if prediction.home == "host" else "on disk"
    speed, step_s = f"{prediction.tokens_per_s:,.0f} tokens/s", format_seconds(prediction.step_s)
    lines = [
        headline(request),
        f"fits, its training state {home}{_resident(prediction, ' but for ')}: {', '.join(tiers)}",
        f"{speed}{_between(prediction)}, {step_s} for a step of {question.tokens_per_step:,} tokens in "
        f"{_counted(prediction.microbatches)}; MFU {prediction.mfu:.0%}",
        f"what ends a step is {prediction.ends_it}",
    ]
    if prediction.tokens is not None and prediction.eta_s is not None:
        lines.append(
            f"{format_count(prediction.tokens)} tokens take {format_seconds(prediction.eta_s)} in "
            f"{prediction.steps:,} steps{f' ({request.note})' if request.note else ''}"
        )
        lines += _wear(request, prediction)
    why = _why_on_disk(request, prediction)
    if why is not None:
        lines.append(f"home on disk, for want of host memory: there {why}")
    lines += _disk_assumed(request, prediction)
    lines += _change_first(helps)
    lines += [f"note: {note}" for note in (*_notes(request), *_small_rounds(prediction))]
    return as_text(
        *lines,
        *(("", _outcome_table("what if", outcomes)) if outcomes else ()),
        *(("", _largest_table(scaled)) if scaled else ()),
        "A prediction, not a measurement, of all tokens, prompts and padding too; --full shows the figures that it "
        "rests on, memory by class, and waits.",
    )


def _disk_assumed(request: Asked, prediction: Prediction) -> list[str]:
    """Return which disk the state rests on, in a line, where nobody has said how fast one is."""
    disk = request.question.machine.disk
    if prediction.home != "disk" or disk is None or disk.read_bytes_per_s != NVME.read_bytes_per_s:
        return []
    room = f"with {disk.capacity_bytes / 1e12:.3g} TB free " * (disk.capacity_bytes == NVME.capacity_bytes)
    return [
        f"assumed: an NVMe drive {room}that reads 7 GB/s; --disk, --disk-read and --disk-write say otherwise"
    ]


def _wear(request: Asked, prediction: Prediction) -> list[str]:
    """Return what the steps do to an SSD, in a line; nothing where they write nothing to it."""
    written, disk = prediction.disk_written_bytes, request.question.machine.disk
    if not written or disk is None:
        return []
    share = written / (SSD_WRITES * disk.capacity_bytes)
    return [
        f"they write {format_bytes(written)} to the disk: {share:.1%} of what an SSD of its size is usually "
        f"warranted for ({SSD_WRITES} times that)"
    ]


def _change_first(helps: Sequence[Outcome]) -> list[str]:
    """Return what to change first, in a line; nothing where nothing gains `LEAST_GAIN`."""
    gains = sorted(
        (
            (outcome.gain, outcome.change)
            for outcome in helps
            if outcome.gain is not None and outcome.gain >= LEAST_GAIN
        ),
        reverse=True,
    )
    if not gains:
        return ["nothing that is usually changed gains two percent"] if helps else []
    return ["to change first: " + ", ".join(f"{change} ({gain:+.0%})" for gain, change in gains[:3])]


def headline(request: Asked, what: str = "") -> str:
    """Return the model, what is asked about it, and the machine, in a line."""
    question = request.question
    nodes = f"{question.nodes} nodes of " if question.nodes > 1 else ""
    return (
        f"{request.name}: {format_count(question.model.num_parameters)} parameters, {question.model.compute_dtype}, "
        f"{what or request.method} on {nodes}{question.machine.name}"
    )


def render(
    request: Asked, prediction: Prediction, outcomes: Outcomes, helps: Outcomes, scaled: Sequence[Scaled] = ()
) -> str:
    """Return the tables as text."""
    why = _why_on_disk(request, prediction)
    helps = [outcome for outcome in helps if outcome.gain is None or outcome.gain >= LEAST_GAIN]
    about = any(outcome.estimated for outcome in helps)
    title = "what would help, estimated (--what-if simulates)" if about else "what would help"
    assumptions = (*ALWAYS, *_notes(request), *_small_rounds(prediction), *prediction.assumptions)
    return as_text(
        headline(request),
        "A prediction from the figures below, not a measurement.\n",
        _memory_table(request, prediction),
        *((f"home on disk, for want of host memory: there {why}\n",) if why is not None else ()),
        _step_table(request, prediction),
        _share_table("compute waits for", "share of the time", prediction.stalls),
        _share_table("in use", "share of the step", prediction.usage),
        *((_outcome_table("what if", outcomes),) if outcomes else ()),
        *((_outcome_table(title, helps),) if helps else ()),
        *((_largest_table(scaled),) if scaled else ()),
        f"verdict: fits. What ends it is {prediction.ends_it}.\n",
        _figure_table(figures_used(request.question, prediction)),
        *(f"assumed: {assumption}" for assumption in assumptions),
    )


def _notes(request: Asked) -> tuple[str, ...]:
    """Return what the figures say besides rates, and whether a device multiplies faster in fp32, as measured."""
    dtype, slow = request.question.model.compute_dtype, []
    for gpu in request.question.machine.gpus:
        rates = {name: rate.value for name, rate in gpu.peak_flops_per_s.items() if rate.measured}
        slower = slower_than_fp32(rates.get(dtype), rates.get("fp32"))
        note = f"products in {dtype} take {slower or 1:.1f} times as long as in fp32 on {gpu.name}: try --dtype fp32"
        if slower is not None and note not in slow:
            slow.append(note)
    if request.question.machine.host.pinned_bytes is not None:
        slow.append(request.question.machine.links[0].up_bytes_per_s.source)
    if request.of_records:
        slow.append("sequences and steps are those that outsize train chooses by chats and prompts")
    return (*request.figures.notes, *slow, *(f"{key}: {rest}" for key, _, rest in _own_kernels(request)))


def _counted(count: int) -> str:
    return "1 microbatch" if count == 1 else f"{count} microbatches"


def _small_rounds(prediction: Prediction) -> Iterator[str]:
    """Yield a note where a round has fewer microbatches than there are GPUs to compute them."""
    layout = prediction.plan.layout
    if layout.round_size < layout.num_workers:
        more = "more tokens per step" if layout.num_rounds == 1 else "more device memory, or --mlp-parts,"
        yield (
            f"a round has {_counted(layout.round_size)} for {layout.num_workers} GPUs, which wait for each other: "
            f"{more} may help"
        )


def _own_kernels(request: Asked) -> Iterator[tuple[str, str, str]]:
    """Yield each setting of the run that gives blocks other kernels, how it is priced, and what that rests on."""
    model, machine = request.config.model, request.question.machine
    source = machine.gpus[0].efficiency.source
    unpriced = "not priced", f"is not priced: no sourced figure of what it gains on {machine.name}"
    if model.kernels == "liger":
        short, long = (
            ("as fused kernels", "has the rate of fused ones") if source.startswith(LIGER) else unpriced
        )
        yield (
            "model.kernels",
            f"liger, {short}",
            f"liger {long}; what norms and activations keep less is counted",
        )
    if model.compile != "off":
        gains = (
            "as published",
            "has a published gain over blocks as they are; memory is theirs, of whole blocks",
        )
        short, long = gains if source.startswith(COMPILED) else unpriced
        yield "model.compile", f"{model.compile}, {short}", f"{model.compile} {long}"


def _why_on_disk(request: Asked, prediction: Prediction) -> str | None:
    """Return what a home in host memory lacks, and what to try; None where it is there, or was asked to be on disk."""
    question = request.question
    if prediction.home == "host" or question.home != "auto":
        return None
    refusal = host_refusal(question.deciding(stages=prediction.stages), prediction.microbatches)
    return None if refusal is None else in_options(str(refusal))


def in_short(outcome: Outcome) -> str:
    """Return an outcome in a line."""
    if outcome.prediction is None:
        return in_options(outcome.error)
    return f"fits, {outcome.prediction.tokens_per_s:,.0f} tokens/s"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of ``rows``, figures in the second and third column, and an empty line behind it."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number in (1, 2) else "left")
    for row in (*rows, [""] * len(headers)):
        table.add_row(*row)
    return table


def _memory_table(request: Asked, prediction: Prediction) -> Table:
    rows = []
    for tier, classes in prediction.memory.items():
        if total := prediction.total_bytes(tier):
            each, budget = "each GPU" if tier == "device" else tier, getattr(request.question.budgets, tier)
            rows.append((each, format_bytes(total), "" if budget is None else format_bytes(budget)))
            rows += [(f"  {name}", format_bytes(size), "") for name, size in classes.items()]
    return _table(("memory", "bytes", "budget"), rows)


def _rounds(prediction: Prediction) -> str:
    """Return how many microbatches go forward and backward before the next ones begin."""
    size, count = prediction.round_microbatches, prediction.microbatches
    return "one" if size >= count else f"{-(-count // size)} of {size} microbatches"


def _step_table(request: Asked, prediction: Prediction) -> Table:
    question, even = request.question, prediction.break_even
    rows = [
        ("tokens", f"{question.tokens_per_step:,}"),
        (
            "microbatches",
            f"{prediction.microbatches} of {prediction.sequences_per_microbatch} x {question.seq_len} tokens",
        ),
        ("rounds", _rounds(prediction)),
        *(("products of Muon", place) for place in (prediction.products_on,) if place is not None),
        *(("on the GPU throughout", units) for units in (_resident(prediction),) if units),
        ("time", format_seconds(prediction.step_s)),
        ("tokens/s", f"{prediction.tokens_per_s:,.0f}{_between(prediction)}"),
        ("MFU, recompute not counted", f"{prediction.mfu:.1%}"),
        ("bubble, compute idle", f"{prediction.bubble:.1%}{_if_free(prediction.free_bubble)}"),
        ("activations", ", ".join(f"{count} {choice}" for choice, count in prediction.activations.items())),
        ("tokens that hide a weight load", f"{even.tokens:,} (a visit has {even.tokens_per_visit:,})"),
    ]
    if prediction.tokens is not None and prediction.eta_s is not None:
        by = f" ({request.note})" if request.note else ""
        took = f"{format_seconds(prediction.eta_s)}, {prediction.steps:,} steps{by}"
        rows.append((f"{format_count(prediction.tokens)} tokens take", took))
        rows += [("", line) for line in _wear(request, prediction)]
    rows += [(key, priced) for key, priced, _ in _own_kernels(request)]
    return _table(("step", ""), [(f"  {name}", value) for name, value in rows])


def _resident(prediction: Prediction, before: str = "") -> str:
    """Return how many units rest on the device with their state, behind ``before``; empty where none does."""
    layout = prediction.plan.layout
    resident, trained = len(layout.resident), len(layout.step_order)
    return f"{before}{resident} of {trained} units, which rest on the GPU" if resident else ""


def _if_free(free_bubble: float | None) -> str:
    return "" if free_bubble is None else f" ({free_bubble:.1%} if copies took no time)"


def _between(prediction: Prediction) -> str:
    low, high = prediction.interval
    return f" ({low:,.0f} to {high:,.0f})" if low < high else ""


def _share_table(title: str, what: str, shares: Mapping[str, float]) -> Table:
    rows = [(f"  {name}", f"{share:.1%}") for name, share in shares.items()]
    return _table((title, what), rows or [("  nothing", "")])


def _outcome_table(title: str, outcomes: Sequence[Outcome]) -> Table:
    rows = []
    for outcome in outcomes:
        result = ("no plan", "", in_options(outcome.error))
        if outcome.prediction is not None:
            gain = "" if outcome.gain is None else f"{outcome.gain:+.1%}"
            ends = outcome.prediction.ends_it.partition(":")[0]
            result = (f"{outcome.prediction.tokens_per_s:,.0f}", gain, ends)
        rows.append((f"  {outcome.change}", *result))
    return _table((title, "tokens/s", "gain", "what ends it then"), rows)


def _largest_table(scaled: Sequence[Scaled]) -> Table:
    rows = [(f"  {model.what}", format_count(model.num_parameters), str(model.layers)) for model in scaled]
    return _table(("the largest of this family that fits", "parameters", "layers"), rows)


def _figure_table(figures: Sequence[UsedFigure]) -> Table:
    rows = []
    for figure in figures:
        in_bytes = figure.unit == "B/s"
        value = format_rate(figure.value) if in_bytes else f"{format_count(figure.value)} {figure.unit}"
        rows.append(
            (f"  {figure.name}", value, f"measured: {figure.source}" if figure.measured else figure.source)
        )
    table = _table(("figures", "", "source"), rows)
    table.columns[2].justify = "left"
    return table


def _outcome_dict(outcome: Outcome) -> dict[str, Any]:
    prediction = outcome.prediction
    return {
        "change": outcome.change,
        "fits": prediction is not None,
        "estimated": outcome.estimated,
        "gain": outcome.gain,
        "error": in_options(outcome.error) or None,
        "tokens_per_s": None if prediction is None else prediction.tokens_per_s,
        "step_s": None if prediction is None else prediction.step_s,
        "ends_it": None if prediction is None else prediction.ends_it,
    }
