"""Measure or count what a microbatch needs in device memory, on the device that computes.

Weights do not matter to sizes, so every unit is bound to one plane of small random numbers, as large as the largest
unit. Blocks of the same class and shapes that are called alike are run once; the others pass on tensors of that form.
Three short lengths are run, and `extrapolate` goes on from there. On an accelerator one microbatch of the run's own
size passes through the units as well, so that what its kernels take inside themselves counts.

The model is that of a run, split as a run splits it, and passed through as `TrialPass` passes through it; so bytes are
those that a run measures. The operations of each distinct unit are counted by PyTorch's own table of FLOPs. What
depends on values (which kernels a graph picks, what the loss makes of logits) is taken to be as in most models.
"""

import contextvars
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.accelerators import CPU as HOST
from outsize.accelerators import Devices, count_of, module_of
from outsize.compat.torch_private import (
    fake_tensors,
    is_grouped_product,
    leaves_of,
    memory_key,
    parameters_of,
    watching,
    without_fake_tensors,
)
from outsize.errors import ModelError, OutsizeError, model_raised
from outsize.model.compiled import is_compiled
from outsize.model.split import Split
from outsize.model.walk import Boundaries, Finished, UnitCall, Walk
from outsize.runtime.device.device import open_device
from outsize.runtime.forward.binding import Binder, buffers_on, weight_planes, weight_views
from outsize.runtime.forward.microbatch import Ambient
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.unit_state import States
from outsize.runtime.trial.effects_trial import UnitEffects
from outsize.runtime.trial.live_bytes import LiveBytes, without_trace
from outsize.runtime.trial.measured import KnownRows, Measured, Row, scale, trial_lengths
from outsize.runtime.trial.trial_pass import TrialPass
from outsize.runtime.trial.unit_measure import CPU, UnitMeasure
from outsize.runtime.trial.unit_trials import bind_trial_weights


class Discard:
    """A gradient sink that keeps nothing."""

    def hook(self, unit: int, position: int) -> Callable[[Tensor], None]:
        """See `GradientSink.hook`."""

        def discard(parameter: Tensor) -> None:
            parameter.grad = None

        return discard


def calibrate(
    split: Split,
    forwards: tuple[Callable[..., Any], ...],
    make_inputs: Callable[[int, int], Mapping[str, Any]],
    *,
    num_sequences: int,
    seq_len: int,
    chunk_tokens: int | None,
    ambient: Ambient = nullcontext,
    devices: Devices = HOST,
    rows: KnownRows | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> Measured:
    """Measure what microbatches of ``num_sequences`` sequences of ``seq_len`` tokens need.

    Args:
        split: the model; its boundaries must be in place.
        forwards: the units' own forwards.
        make_inputs: ``(num_sequences, seq_len) → inputs`` with labels, as training will see them.
        num_sequences: sequences per microbatch.
        seq_len: tokens per sequence.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        ambient: makes what the model's forward runs in, on the device: an autocast, say.
        devices: of the run, of which the first one is measured on; units that are compiled are measured on the host
            where they run there, and so is what devices of another machine are to compute.
        rows: what passes have noted before; what they note now is added.
        announce: called with a line where the device has no room for its trial.

    Raises:
        ModelError: the model does not call its units once each, in order, or raised something.
    """
    rows = KnownRows() if rows is None else rows
    trial_on = partial(_Trial, split, forwards, make_inputs, chunk_tokens, ambient, rows)
    size = num_sequences, seq_len
    compiled = any(map(is_compiled, forwards))
    there = devices.accelerated and devices.index < count_of(devices.kind)
    if devices.accelerated and not there:
        announce(
            f"trial: {devices.each[0]} is not in this machine; what a microbatch takes is measured on the CPU"
        )
    # Kernels keep buffers for every thread that ever called them; those of this one go with it.
    with ThreadPoolExecutor(1, "calibrate") as thread:
        run = contextvars.copy_context().run
        on_device = partial(_on_device, trial_on, devices, size, announce)
        if there and not compiled and (m := thread.submit(run, on_device).result()):
            return m
        try:
            return thread.submit(run, lambda: trial_on(CPU).measured(*size)).result()
        except ModelError:  # as of attention that takes tensors of a device alone
            if not (there and compiled and (m := thread.submit(run, on_device).result())):
                raise
            return m


def _on_device(
    trial_on: Callable[[torch.device], "_Trial"],
    devices: Devices,
    size: tuple[int, int],
    announce: Callable[[str], None],
) -> Measured | None:
    """Measure on the first device; None where not even short sequences fit."""
    target = devices.torch_device
    with module_of(target).device(target), closing(open_device(devices.each[0])):
        trial = trial_on(target)
        try:
            short, full = trial.short(*size), None
        except torch.OutOfMemoryError:
            announce(f"trial: a unit does not fit {devices.each[0]}; what it takes is measured on the CPU")
            return None
        try:
            full = trial.full(*size)
        except torch.OutOfMemoryError:
            announce(
                f"trial: a microbatch of {size[0]} sequences of {size[1]} tokens does not fit {devices.each[0]}; what "
                "its units take is extrapolated from short ones, without what kernels take inside themselves"
            )
        return trial.scaled(short, full, *size)


class _Trial:
    """Passes over a model on one device; arguments are those of `calibrate`."""

    def __init__(
        self,
        split: Split,
        forwards: tuple[Callable[..., Any], ...],
        make_inputs: Callable[[int, int], Mapping[str, Any]],
        chunk_tokens: int | None,
        ambient: Ambient,
        rows: KnownRows,
        device: torch.device,
    ) -> None:
        self._split, self._forwards, self._make_inputs = split, forwards, make_inputs
        self._chunk_tokens, self._ambient, self._rows, self._device = chunk_tokens, ambient, rows, device

    def measured(self, num_sequences: int, seq_len: int) -> Measured:
        """Return what short sequences tell of microbatches."""
        return self.scaled(self.short(num_sequences, seq_len), None, num_sequences, seq_len)

    def short(self, num_sequences: int, seq_len: int) -> list[Row]:
        """Return what passes over one sequence each note, at short lengths; of images, one over two as well."""
        lengths = trial_lengths(seq_len, num_sequences)
        rows = self._noted(f"{self._device.type} {lengths}", [(1, length) for length in lengths], seq_len)
        inputs_by_unit = zip(*(row.boundary for row in rows), strict=True)
        if len(lengths) == 1 or not any(len(set(inputs)) == 1 and inputs[0] for inputs in inputs_by_unit):
            return rows
        with suppress(ModelError):  # of inputs that are not cut by rows
            return [*rows, *self._noted(f"{self._device.type} two {lengths[0]}", [(2, lengths[0])], seq_len)]
        return rows

    def full(self, num_sequences: int, seq_len: int) -> Row:
        """Return what a pass over a microbatch notes, up to the last unit."""
        size = num_sequences, seq_len
        return self._noted(f"{self._device.type} full {size}", [size], seq_len, is_full=True)[0]

    def scaled(self, short: list[Row], full: Row | None, num_sequences: int, seq_len: int) -> Measured:
        """Return what microbatches need; see `scale`."""
        lengths = trial_lengths(seq_len, num_sequences)
        return scale(short, lengths, num_sequences, seq_len, self._chunk_tokens, full)

    def _noted(
        self, name: str, sizes: Sequence[tuple[int, int]], seq_len: int, *, is_full: bool = False
    ) -> list[Row]:
        noted = self._rows.get(name)
        if noted is None or len(noted) != len(sizes):
            noted = self._run(sizes, seq_len, is_full)
            self._rows.put(name, noted)
        return noted

    def _run(self, sizes: Sequence[tuple[int, int]], seq_len: int, is_full: bool) -> list[Row]:
        split, device = self._split, self._device
        binder = Binder(split, Discard())
        try:
            with buffers_on(split.model, device), without_trace(split.model, device):
                memory = bind_trial_weights(binder, split.spec, device)
                return [
                    TrialPass(
                        split,
                        self._forwards,
                        self._make_inputs(*size),
                        self._chunk_tokens,
                        self._ambient,
                        self._rows.effects,
                        is_longest=size == sizes[-1],
                        device=device,
                        is_full=is_full,
                    ).run(memory.untyped_storage())
                    for size in sizes
                ]
        except (OutsizeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            advice = "is the length within the model's limit, and does it run on such a batch by itself?"
            if "grad" in str(error):
                advice = "layers also run without a graph: have hooks in them ask for requires_grad first"
            raise model_raised(
                f"{type(split.model).__name__} raised in a trial on sequences of {seq_len} tokens: "
                f"{type(error).__name__}: {error}; {advice}",
                error,
            ) from error
        finally:
            binder.close()


def count(
    parts: Split,
    make_inputs: Callable[[int, int], Mapping[str, Any]],
    *,
    lengths: Sequence[int],
    chunk_tokens: int,
    shifted: bool = True,
    twice: bool = False,
) -> list[Row]:
    """Count what a model takes; no weights exist, and nothing is computed.

    Args:
        parts: the model, its parameters on meta.
        make_inputs: ``(num_sequences, seq_len) → inputs``, with labels where its loss is asked about.
        lengths: of the sequences that are run.
        chunk_tokens: tokens per chunk of the loss, where that is the cross-entropy of the head's own output.
        shifted: whether the loss is of the next token.
        twice: whether two sequences of the first length are run as well: images do not grow with a length.

    Returns:
        What each pass noted.

    Raises:
        ModelError: the model does not call its units once each, in order, or does what only real values allow.
    """
    rows = []
    # Ids, positions and masks are real, as models look at their values; within units they have a form only.
    formed = fake_tensors(allow_real=True)
    memory, parameters = _bind(parts, formed)
    try:
        with Boundaries(parts.modules) as boundaries:
            sizes = [(1, length) for length in lengths] + [(2, lengths[0])] * twice
            for size in sizes:
                inputs = make_inputs(*size)
                one = _CountedPass(parts, boundaries.forwards, inputs, chunk_tokens, formed, shifted)
                rows.append(one.run(memory.untyped_storage()))
    except OutsizeError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(parts.model).__name__} cannot be counted without its weights: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}; `outsize train --dry-run` measures the model itself"
        ) from error
    finally:
        for module, name, parameter in parameters:
            parameters_of(module)[name] = parameter
    return rows


def _bind(parts: Split, formed: Any) -> tuple[Tensor, list[tuple[nn.Module, str, Any]]]:
    """Give every unit weights that are views of one memory; returns it, and the parameters that were there."""
    dtype, drop = parts.spec.dtype, Discard()
    parameters = []
    with formed:
        memory = torch.empty(max(unit.weight_bytes(dtype) for unit in parts.spec.units), dtype=torch.uint8)
    for unit in parts.spec.units:
        with formed:
            views = weight_views(unit, weight_planes(unit, dtype, memory))
        for position, (tensor, view) in enumerate(zip(unit.all_tensors, views, strict=True)):
            parameter = nn.Parameter(view, requires_grad=tensor.trainable)
            if tensor.trainable:
                parameter.register_post_accumulate_grad_hook(drop.hook(unit.index, position))  # type: ignore[no-untyped-call]
            for module, name in parts.owners[tensor.name]:
                parameters.append((module, name, parameters_of(module)[name]))
                parameters_of(module)[name] = parameter
    return memory, parameters


def form_operation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on tensors without values, or on real whole numbers: where images begin, units cut by these.

    Of products of tokens with their experts torch knows the form for bf16 alone, and for sizes that its kernels take.
    """
    if is_grouped_product(func):
        left, right = args[:2]
        groups = (args[2] if len(args) > 2 else kwargs["offs"]).shape if left.ndim == right.ndim == 2 else ()
        rows = left.shape[:-1] if left.ndim <= right.ndim else left.shape[1:-1]
        return left.new_empty(*groups, *rows[-2 if left.ndim == right.ndim == 3 else -1 :], right.shape[-1])
    if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_):
        args = args[0], _places(args[1]), *args[2:]
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    is_real = all(type(one) is Tensor and one.ndim < 2 and not one.is_floating_point() for one in tensors)
    with without_fake_tensors() if tensors and is_real else nullcontext():
        return func(*args, **kwargs)


def _places(indices: Sequence[Any]) -> list[Any]:
    """Return indices with the places that real masks choose, whose number decides the form of what is chosen."""
    chosen = (
        each.nonzero().unbind(1) if type(each) is Tensor and each.dtype is torch.bool else (each,)
        for each in indices
    )
    return [place for places in chosen for place in places]


class _CountedUnits(UnitMeasure):
    """Units that are measured on tensors without values, of which nothing can be compared."""

    formed: Any

    def run(self, unit: int, call: UnitCall, live: LiveBytes) -> Any:
        with self.formed, watching(form_operation):
            return super().run(unit, call, live)

    def effects_of(self, unit: int, call: UnitCall, live: LiveBytes) -> UnitEffects:
        """Return what the call alone tells."""
        return UnitEffects(objects=bool(outline_of((call.args, tuple(call.kwargs.values())))[1].places))

    def is_same(self, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return True

    def note_random(self, before: States) -> None:
        self._row.random = True


class _CountedPass(TrialPass):
    """A forward over units whose tensors have no values."""

    def __init__(
        self,
        parts: Split,
        forwards: tuple[Callable[..., Any], ...],
        inputs: Mapping[str, Any],
        chunk_tokens: int,
        formed: Any,
        shifted: bool,
    ) -> None:
        super().__init__(parts, forwards, inputs, chunk_tokens)
        self._units = _CountedUnits(parts, forwards, nullcontext, self._row, {})
        self._units.formed = self._formed = formed
        self._shifted = shifted

    def _advance(self, walk: Walk, unit: int, outputs: Any) -> UnitCall | Finished:
        with watching(form_operation):
            return super()._advance(walk, unit, outputs)

    def _last(self, unit: int, call: UnitCall, walk: Walk, live: LiveBytes) -> None:
        with self._formed, live, watching(form_operation):
            super()._last(unit, call, walk, live)

    def _note_loss(self, head_output: Any, output: Any) -> None:
        """A loss is that of the head's own output where the model returns that output as its logits."""
        logits = getattr(output, "logits", None)
        if isinstance(head_output, Tensor) and isinstance(logits, Tensor):
            self._row.plain = self._shifted and memory_key(head_output) == memory_key(logits)
        self._row.shifted = self._shifted
