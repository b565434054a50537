"""What a microbatch of any model takes, counted: the trial of a run on tensors that have a form and no memory.

The model is that of a run, split as a run splits it, and passed through as `TrialPass` passes through it; so bytes are
those that a run measures. The operations of each distinct unit are counted by PyTorch's own table of FLOPs. What
depends on values (which kernels a graph picks, what the loss makes of logits) is taken to be as in most models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from outsize.compat.dispatch import OperationMode, fake_tensors
from outsize.compat.modules import parameters_of
from outsize.compat.storages import memory_key
from outsize.errors import ModelError, OutsizeError
from outsize.model.sizes.model_spec import Workload
from outsize.model.split import Split
from outsize.model.walk import Boundaries, UnitCall, Walk
from outsize.runtime.forward.binding import weight_planes, weight_views
from outsize.runtime.forward.outline import outline_of
from outsize.runtime.forward.selective_recompute import ATTENTION
from outsize.runtime.ops.compute_ops import tracked_units
from outsize.runtime.trial.calibrate import Discard, trial_lengths
from outsize.runtime.trial.effects_trial import UnitEffects
from outsize.runtime.trial.extrapolate import extrapolate
from outsize.runtime.trial.live_bytes import LiveBytes
from outsize.runtime.trial.measured import Kept, Measured, Row, scale
from outsize.runtime.trial.op_outputs import attention_flops
from outsize.runtime.trial.trial_pass import TrialPass

# Products of tokens with their experts' weights in one operation, which PyTorch's table does not know: each row of the
# first operand goes through one matrix of the second.
_GROUPED = ("_grouped_mm", "grouped_mm_fallback")


@dataclass(slots=True)
class _UnitFlops:
    """FLOPs of a unit for one sequence.

    Attributes:
        forward: of its forward.
        needed: of as much of it as its backward needs.
        gradient: of its backward.
        routed: of its forward, those of tokens with the experts that they visit.
    """

    forward: int = 0
    needed: int = 0
    gradient: int = 0
    routed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a model takes at some lengths of a sequence, and so at any.

    Attributes:
        kinds: of its streamed units.
        lengths: that were run, ascending.
        rows: what each of them noted.
        flops: of each unit, for each of them.
        chunk_tokens: tokens per chunk of the loss.
    """

    kinds: tuple[str, ...]
    lengths: tuple[int, ...]
    rows: tuple[Row, ...]
    flops: tuple[tuple[_UnitFlops, ...], ...]
    chunk_tokens: int

    def workload(self, sequences: int, seq_len: int) -> Workload:
        """Return what a microbatch of ``sequences`` sequences of ``seq_len`` tokens takes."""
        chunked = all(row.plain for row in self.rows)
        found = scale(
            list(self.rows), self.lengths, sequences, seq_len, self.chunk_tokens if chunked else None
        )
        forward, needed, gradient, routed = (
            self._flops(kind, sequences, seq_len) for kind in ("forward", "needed", "gradient", "routed")
        )
        return Workload(
            tokens=sequences * seq_len,
            forward_flops=forward,
            recompute_flops=needed,
            gradient_flops=gradient,
            routed_flops=routed if any(routed) else (),
            boundary_bytes=found.boundary_bytes,
            forward_workspace_bytes=self._by_kind(found.forward_bytes),
            backward_workspace_bytes=self._by_kind(found.backward_bytes),
            saved_bytes=found.saved_bytes,
            held_bytes=found.held_bytes,
            **_selected(found),
        )

    def _flops(self, kind: str, sequences: int, seq_len: int) -> tuple[float, ...]:
        return tuple(
            float(
                extrapolate(
                    self.lengths,
                    tuple((getattr(row[unit], kind),) for row in self.flops),
                    seq_len,
                    sequences,
                )
            )
            for unit in range(len(self.kinds))
        )

    def _by_kind(self, sizes: Sequence[int]) -> dict[str, int]:
        return {
            kind: max(size for each, size in zip(self.kinds, sizes, strict=True) if each == kind)
            for kind in dict.fromkeys(self.kinds)
        }


def count(
    parts: Split,
    make_inputs: Callable[[int, int], Mapping[str, Any]],
    *,
    seq_len: int,
    chunk_tokens: int,
    shifted: bool = True,
) -> Counts:
    """Count what a model takes; no weights exist, and nothing is computed.

    Args:
        parts: the model, its parameters on meta.
        make_inputs: ``(num_sequences, seq_len) → inputs`` with labels.
        seq_len: tokens of the sequences that are asked about.
        chunk_tokens: tokens per chunk of the loss, where that is the cross-entropy of the head's own output.
        shifted: whether the loss is of the next token.

    Raises:
        ModelError: the model does not call its units once each, in order, or does what only real values allow.
    """
    lengths = trial_lengths(seq_len, 2)
    rows, flops = [], []
    # Ids, positions and masks are real, as models look at their values; within units they have a form only.
    formed = fake_tensors(allow_real=True)
    memory, former = _bind(parts, formed)
    try:
        with Boundaries(parts.modules) as boundaries:
            for length in lengths:
                inputs = make_inputs(1, length)
                one = _CountedPass(parts, boundaries.forwards, inputs, chunk_tokens, formed, shifted)
                rows.append(one.run(memory.untyped_storage()))
                flops.append(tuple(one.flops))
    except OutsizeError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(parts.model).__name__} cannot be counted without its weights: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}; `outsize train --dry-run` measures the model itself"
        ) from error
    finally:
        for module, name, parameter in former:
            parameters_of(module)[name] = parameter
    streamed = parts.spec.units[: parts.spec.num_streamed]
    return Counts(
        kinds=tuple(unit.kind for unit in streamed),
        lengths=lengths,
        rows=tuple(rows),
        flops=tuple(flops),
        chunk_tokens=chunk_tokens,
    )


def _bind(parts: Split, formed: Any) -> tuple[Tensor, list[tuple[nn.Module, str, Any]]]:
    """Give every unit weights that are views of one memory; returns it, and the parameters that were there."""
    dtype, drop = parts.spec.dtype, Discard()
    former = []
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
                former.append((module, name, parameters_of(module)[name]))
                parameters_of(module)[name] = parameter
    return memory, former


def _selected(found: Measured) -> dict[str, Any]:
    """Return what attention and products return, where any unit has them in operations of their own."""
    if not any(one.num_bytes for one in found.attention):
        return {}
    return {
        "attention_bytes": tuple(one.num_bytes for one in found.attention),
        "attention_flops": tuple(float(one.flops) for one in found.attention),
        "products_bytes": tuple(one.num_bytes for one in found.products),
    }


class _FlopsNotes(OperationMode):
    """While active, notes the FLOPs of every operation that PyTorch has a formula for.

    Args:
        live: sees the same operations; it says how many there have been.

    Attributes:
        noted: how many operations a forward with a graph had run, -1 outside of one; the FLOPs of the next; and
            whether it is of tokens with their experts.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live
        self.noted: list[tuple[int, int, bool]] = []

    def handle(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation, and note its FLOPs."""
        at = -1 if self._live.ops is None else len(self._live.ops)
        out = func(*args, **kwargs)
        flops = _flops_of(func, args, kwargs, out)
        if flops:
            self.noted.append((at, flops, _name(func) in _GROUPED))
        return out

    def take(self) -> list[tuple[int, int, bool]]:
        """Return what was noted, and begin again."""
        noted, self.noted = self.noted, []
        return noted


def _flops_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> int:
    if func in ATTENTION:
        return attention_flops(args, kwargs)
    packet = getattr(func, "overloadpacket", func)
    name = _name(func)
    if name.startswith("_scaled_dot_product") and name.endswith("backward"):
        return 2 * attention_flops(
            args[1:], kwargs
        )  # scores that it makes again are not counted, as elsewhere
    if name in _GROUPED:
        return int(2 * args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    return int(formula(*args, **kwargs, out_val=out))


def _name(func: Any) -> str:
    return getattr(getattr(func, "overloadpacket", func), "__name__", "")


class _CountedPass(TrialPass):
    """A forward over units whose tensors have no values.

    Attributes:
        flops: of each unit.
    """

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
        self._formed = formed
        self._shifted = shifted
        self._tracked = tracked_units(parts.spec)  # others run no backward
        self._counted: dict[Any, _UnitFlops] = {}
        self.flops: list[_UnitFlops] = []

    def _unit(self, unit: int, call: UnitCall, live: LiveBytes) -> Any:
        key = self._form(unit, call)
        with self._formed, _FlopsNotes(live) as counter:
            outputs = super()._unit(unit, call, live)
        if key not in self._counted:
            self._counted[key] = _sorted_out(counter.take(), self._row.kept[-1], self._last_needed)
        found = self._counted[key]
        self.flops.append(found if self._tracked[unit] else replace(found, gradient=0))
        return outputs

    def _last(self, unit: int, call: UnitCall, walk: Walk, live: LiveBytes) -> None:
        with self._formed, live, _FlopsNotes(live) as counter, torch.no_grad():
            self._forwards[unit](*call.args, **call.kwargs)
        forward = sum(flops for _, flops, _ in counter.take())
        trains = any(parameter.requires_grad for parameter in self._split.modules[unit].parameters())
        self.flops.append(_UnitFlops(forward=forward, needed=forward, gradient=(1 + trains) * forward))
        with self._formed, live:
            super()._last(unit, call, walk, live)

    def _effects_of(self, key: Any, unit: int, call: UnitCall, live: LiveBytes) -> UnitEffects:
        """Only what a call tells: there are no values to compare."""
        return UnitEffects(objects=bool(outline_of((call.args, tuple(call.kwargs.values())))[1].places))

    def _is_same(self, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
        return True

    def _note_random(self, before: Tensor) -> None:
        self._row.random = True

    def _note_loss(self, made: Any, output: Any) -> None:
        """A loss is that of the head's own output where the model returns that output as its logits."""
        logits = getattr(output, "logits", None)
        if isinstance(made, Tensor) and isinstance(logits, Tensor):
            self._row.plain = self._shifted and memory_key(made) == memory_key(logits)
        self._row.shifted = self._shifted


def _sorted_out(noted: list[tuple[int, int, bool]], kept: Kept, last_needed: int) -> _UnitFlops:
    """Tell the forward, which ran twice, first without a graph, from the backward.

    While it ran with a graph operations were numbered, and before and behind it they were not.
    """
    graph = [index for index, (at, *_) in enumerate(noted) if at >= 0]
    first, last = (graph[0], graph[-1] + 1) if graph else (len(noted), len(noted))
    forward = [flops for _, flops, _ in noted[first:last]]
    needed = [flops for at, flops, _ in noted[first:last] if at < last_needed]
    return _UnitFlops(
        forward=sum(forward),
        needed=sum(needed if kept.needed is not None else forward),
        gradient=sum(flops for _, flops, _ in noted[last:]),
        routed=sum(flops for _, flops, is_routed in noted[first:last] if is_routed),
    )
