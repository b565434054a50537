"""Sizes and FLOPs of a model, counted at some sequence lengths, scaled to any, and kept on disk. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.runtime.trial.measured import Kept, Measured, Row, Trace, scale


@dataclass(frozen=True, slots=True)
class UnitCount:
    """What one unit takes, by the lengths that were run; see `outsize.runtime.trial.measured.Row`."""

    boundary: tuple[int, ...]
    forward: tuple[Trace, ...]
    backward: tuple[Trace, ...]
    kept: tuple[Kept, ...]


@dataclass(frozen=True, slots=True)
class LengthCount:
    """What lies around the units of a pass over a sequence of one length; see `outsize.runtime.trial.measured.Row`."""

    held: int
    shared: bool
    plain: bool
    glue: int
    output: int
    chunk_tokens: tuple[int, ...]
    chunk: tuple[Trace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What was counted of a model.

    Attributes:
        spec: its units.
        can_part: whether its MLPs could take their tokens in parts, and do not.
        chunk_tokens: tokens per chunk of the loss.
        lengths: that were run, ascending.
        passes: over a sequence of each of them; perhaps one more, over two of the first length.
        forms: what units take, those alike once.
        form_of: of each streamed unit, which of them.
    """

    spec: ModelSpec
    can_part: bool
    chunk_tokens: int
    lengths: tuple[int, ...]
    passes: tuple[LengthCount, ...]
    forms: tuple[UnitCount, ...]
    form_of: tuple[int, ...]

    @classmethod
    def of(
        cls, spec: ModelSpec, can_part: bool, chunk_tokens: int, lengths: tuple[int, ...], rows: Sequence[Row]
    ) -> "Counts":
        """Return what passes over sequences of ``lengths`` noted as ``rows``."""
        units = [
            UnitCount(*(tuple(parts) for parts in zip(*one, strict=True)))
            for one in zip(
                *(zip(row.boundary, row.forward, row.backward, row.kept, strict=True) for row in rows),
                strict=True,
            )
        ]
        forms = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        passes = tuple(
            LengthCount(*(getattr(row, field.name) for field in fields(LengthCount))) for row in rows
        )
        return cls(
            spec=spec,
            can_part=can_part,
            chunk_tokens=chunk_tokens,
            lengths=lengths,
            passes=passes,
            forms=tuple(forms),
            form_of=tuple(forms[unit] for unit in units),
        )

    def workload(self, sequences: int, seq_len: int) -> Workload:
        """Return what a microbatch of ``sequences`` sequences of ``seq_len`` tokens takes."""
        rows = [self._row(index) for index in range(len(self.passes))]
        chunked = all(row.plain for row in rows)
        measured = scale(rows, self.lengths, sequences, seq_len, self.chunk_tokens if chunked else None)
        flops = measured.flops.of(sequences, seq_len)
        routed = any(one.routed for one in flops)
        return Workload(
            tokens=sequences * seq_len,
            forward_flops=tuple(one.forward for one in flops),
            recompute_flops=tuple(one.needed for one in flops),
            gradient_flops=tuple(one.gradient for one in flops),
            routed_flops=tuple(one.routed for one in flops if routed),
            routed_moved_elements=tuple(one.routed_moved for one in flops if routed),
            moved_elements=tuple(one.moved for one in flops),
            low_rank_elements=tuple(one.low_rank for one in flops if self._has_adapters),
            boundary_bytes=measured.boundary_bytes,
            forward_workspace_bytes=self._by_kind(measured.forward_bytes),
            backward_workspace_bytes=self._by_kind(measured.backward_bytes),
            saved_bytes=measured.saved_bytes,
            held_bytes=measured.held_bytes,
            **_selected(measured),
        )

    @property
    def _has_adapters(self) -> bool:
        return any(".lora_" in tensor.name for unit in self.spec.units for tensor in unit.all_tensors)

    def _row(self, index: int) -> Row:
        units, one = [self.forms[form] for form in self.form_of], self.passes[index]
        return Row(
            [unit.boundary[index] for unit in units],
            [unit.forward[index] for unit in units],
            [unit.backward[index] for unit in units],
            [unit.kept[index] for unit in units],
            **{field.name: getattr(one, field.name) for field in fields(LengthCount)},
        )

    def _by_kind(self, sizes: Sequence[int]) -> dict[str, int]:
        kinds = [unit.kind for unit in self.spec.units[: len(sizes)]]
        return {
            kind: max(size for each, size in zip(kinds, sizes, strict=True) if each == kind) for kind in kinds
        }


def _selected(measured: Measured) -> dict[str, Any]:
    """Return what attention and products return, where any unit has them in operations of their own."""
    if not any(one.num_bytes for one in measured.attention):
        return {}
    return {
        "attention_bytes": tuple(one.num_bytes for one in measured.attention),
        "attention_flops": tuple(float(one.flops) for one in measured.attention),
        "products_bytes": tuple(one.num_bytes for one in measured.products),
    }


def dump(counts: Counts) -> bytes:
    """Return ``counts`` as JSON; see `parse`."""
    return _adapter().dump_json(counts)


def parse(text: bytes) -> Counts:
    """Return the counts of a text of `dump`.

    Raises:
        ValueError: it is none, or its parts do not go together.
    """
    counts = _adapter().validate_json(text)
    if len(counts.form_of) != counts.spec.num_streamed:
        raise ValueError("counts of other units than the model's")
    try:
        counts.workload(1, counts.lengths[-1])
    except (ArithmeticError, LookupError, TypeError) as error:
        raise ValueError(f"counts that do not go together: {error}") from error
    return counts


@cache
def _adapter() -> TypeAdapter[Counts]:
    return TypeAdapter(Counts)
