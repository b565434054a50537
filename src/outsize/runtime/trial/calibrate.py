"""Measure or count what a microbatch needs in device memory, at short lengths, scaled.

Weights do not matter to sizes, so every unit is bound to one plane of small random numbers, as large as the largest
unit. Blocks of the same class and shapes that are called alike are run once; the others pass on tensors of that form.
Three short lengths are run, and `extrapolate` goes on from there.

The model is that of a run, split as a run splits it, and passed through as `TrialPass` passes through it; so bytes are
those that a run measures. The operations of each distinct unit are counted by PyTorch's own table of FLOPs. What
depends on values (which kernels a graph picks, what the loss makes of logits) is taken to be as in most models.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat.torch_private import (
    fake_tensors,
    form_grouped_product,
    memory_key,
    parameters_of,
    watching,
)
from outsize.errors import ModelError, OutsizeError
from outsize.model.split import Split
from outsize.model.walk import Boundaries, UnitCall, Walk
from outsize.runtime.forward.binding import Binder, weight_planes, weight_views
from outsize.runtime.forward.microbatch import Ambient
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.trial.effects_trial import UnitEffects
from outsize.runtime.trial.live_bytes import LiveBytes, without_trace
from outsize.runtime.trial.measured import Measured, Row, scale, trial_lengths
from outsize.runtime.trial.trial_pass import TrialPass
from outsize.runtime.trial.unit_measure import UnitMeasure
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
) -> Measured:
    """Measure what microbatches of ``num_sequences`` sequences of ``seq_len`` tokens need.

    Args:
        split: the model; its boundaries must be in place.
        forwards: the units' own forwards.
        make_inputs: ``(num_sequences, seq_len) → inputs`` with labels, as training will see them.
        num_sequences: sequences per microbatch.
        seq_len: tokens per sequence.
        chunk_tokens: tokens per chunk of the loss; None for the model's own loss.
        ambient: makes what the model's forward runs in, on a CPU: an autocast, say.

    Raises:
        ModelError: the model does not call its units once each, in order, or raised something.
    """
    # Kernels keep buffers for every thread that ever called them; those of this one go with it.
    with ThreadPoolExecutor(1, "calibrate") as thread:
        return thread.submit(
            _calibrate, split, forwards, make_inputs, num_sequences, seq_len, chunk_tokens, ambient
        ).result()


def _calibrate(
    split: Split,
    forwards: tuple[Callable[..., Any], ...],
    make_inputs: Callable[[int, int], Mapping[str, Any]],
    num_sequences: int,
    seq_len: int,
    chunk_tokens: int | None,
    ambient: Ambient,
) -> Measured:
    lengths = trial_lengths(seq_len, num_sequences)
    binder = Binder(split, Discard())
    try:
        memory = bind_trial_weights(binder, split.spec)
        effects: dict[Any, UnitEffects] = {}
        with without_trace(split.model):
            rows = [
                TrialPass(
                    split,
                    forwards,
                    make_inputs(1, length),
                    chunk_tokens,
                    ambient,
                    effects,
                    is_longest=length == lengths[-1],
                ).run(memory.untyped_storage())
                for length in lengths
            ]
    except OutsizeError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(split.model).__name__} raised in a trial on sequences of {seq_len} tokens: {type(error).__name__}: "
            f"{error}; is the length within the model's limit, and does it run on such a batch by itself?"
        ) from error
    finally:
        binder.close()
    return scale(rows, lengths, num_sequences, seq_len, chunk_tokens)


def count(
    parts: Split,
    make_inputs: Callable[[int, int], Mapping[str, Any]],
    *,
    seq_len: int,
    chunk_tokens: int,
    shifted: bool = True,
) -> tuple[tuple[int, ...], list[Row]]:
    """Count what a model takes; no weights exist, and nothing is computed.

    Args:
        parts: the model, its parameters on meta.
        make_inputs: ``(num_sequences, seq_len) → inputs`` with labels.
        seq_len: tokens of the sequences that are asked about.
        chunk_tokens: tokens per chunk of the loss, where that is the cross-entropy of the head's own output.
        shifted: whether the loss is of the next token.

    Returns:
        The lengths of sequences that were run, and what each pass noted.

    Raises:
        ModelError: the model does not call its units once each, in order, or does what only real values allow.
    """
    lengths = trial_lengths(seq_len, 2)
    rows = []
    # Ids, positions and masks are real, as models look at their values; within units they have a form only.
    formed = fake_tensors(allow_real=True)
    memory, parameters = _bind(parts, formed)
    try:
        with Boundaries(parts.modules) as boundaries:
            for length in lengths:
                inputs = make_inputs(1, length)
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
    return lengths, rows


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


class _CountedUnits(UnitMeasure):
    """Units that are measured on tensors without values, of which nothing can be compared."""

    formed: Any

    def run(self, unit: int, call: UnitCall, live: LiveBytes) -> Any:
        with self.formed, watching(form_grouped_product):
            return super().run(unit, call, live)

    def effects_of(self, unit: int, call: UnitCall, live: LiveBytes) -> UnitEffects:
        """Return what the call alone tells."""
        return UnitEffects(objects=bool(outline_of((call.args, tuple(call.kwargs.values())))[1].places))

    def is_same(self, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return True

    def note_random(self, before: Tensor) -> None:
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

    def _last(self, unit: int, call: UnitCall, walk: Walk, live: LiveBytes) -> None:
        with self._formed, live, watching(form_grouped_product):
            super()._last(unit, call, walk, live)

    def _note_loss(self, head_output: Any, output: Any) -> None:
        """A loss is that of the head's own output where the model returns that output as its logits."""
        logits = getattr(output, "logits", None)
        if isinstance(head_output, Tensor) and isinstance(logits, Tensor):
            self._row.plain = self._shifted and memory_key(head_output) == memory_key(logits)
        self._row.shifted = self._shifted
