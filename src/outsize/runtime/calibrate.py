"""What a microbatch needs in device memory: measured on one unit of each kind, at a short length, and scaled.

Weights do not matter to sizes, so every unit is bound to one plane of small random numbers, as large as the largest
unit. Blocks of the same class and shapes that are called alike are run once; the others pass on tensors of that form.
Three short lengths are run, and `extrapolate` goes on from there.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from outsize.errors import ModelError, OutsizeError
from outsize.model.split import Split
from outsize.model.walk import Finished, UnitCall, Walk
from outsize.runtime.binding import Binder
from outsize.runtime.boundary import hand_out, is_differentiable
from outsize.runtime.extrapolate import Trace, extrapolate
from outsize.runtime.glue_use import GlueUses, units_that_share
from outsize.runtime.head_loss import chunked_head_loss, shift_labels
from outsize.runtime.live_bytes import LiveBytes
from outsize.runtime.microbatch import Ambient, loss_of
from outsize.runtime.shortcut import Needed, Trial
from outsize.runtime.trial_weights import bind_trial_weights
from outsize.runtime.yields import Yield, Yields, YieldTrial

SHORT_LENGTHS = (64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes that one microbatch needs on the device.

    Attributes:
        boundary_bytes: per unit, what it receives and what must be kept for its backward.
        forward_bytes: per unit, the most alive during its forward, beyond its input.
        backward_bytes: per unit, the most alive during recompute and backward; for the last unit, of FB.
        saved_bytes: per unit, what its forward leaves alive for its backward besides its input and its output; 0 for
            the last where the loss is taken in chunks.
        output_bytes: what the model returns: logits, mostly.
        held_bytes: what the model's own code keeps from the first unit to the last: masks, position tables, glue.
        inputs_shared: whether an activation is an input of more than one unit, or a unit takes several, so that they
            stay on the device.
        plain_head: whether the model's loss is the cross-entropy of the head's own output, shifted by one token.
        shifted: whether the model's loss is of the next token, so that the first label of a sequence is no target.
        graph_matters: whether a unit computes other bits when it makes a graph, as with kernels that are chosen by
            whether a mask needs a gradient; then a forward must make one too, to be what a resident forward is.
        rest_users: units whose backward, with the code before them, adds to the gradient of a rest that trains.
        draws_random: whether units, or the code between them, draw random numbers.
        needed: by unit, how far its recompute has to go; for those that may end early.
        attention: per unit, what its attention returns; zeros for the last.
        products: per unit, the same of its attention and of those products that its backward needs.
        num_products: by unit, how many of its products that are; for those where lengths agree on it.
        num_saved: per unit, tensors that its forward saves for its backward.
        num_sequences: of the microbatch.
        seq_len: tokens of each.
    """

    boundary_bytes: tuple[int, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    output_bytes: int
    held_bytes: int
    inputs_shared: bool
    plain_head: bool
    shifted: bool
    graph_matters: bool
    rest_users: frozenset[int] = frozenset()
    draws_random: bool = True
    needed: Mapping[int, Needed] = field(default_factory=dict)
    attention: tuple[Yield, ...] = ()
    products: tuple[Yield, ...] = ()
    num_products: Mapping[int, int] = field(default_factory=dict)
    num_saved: tuple[int, ...] = ()
    num_sequences: int = 1
    seq_len: int = 1


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
    lengths = _lengths(seq_len, num_sequences)
    binder = Binder(split, Discard())
    try:
        memory = bind_trial_weights(binder, split.spec)
        state = torch.get_rng_state()
        rows = [
            _Pass(split, forwards, make_inputs(1, length), chunk_tokens, ambient).run(
                memory.untyped_storage()
            )
            for length in lengths
        ]
        torch.set_rng_state(state)
    except OutsizeError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(split.model).__name__} raised in a trial on sequences of {seq_len} tokens: {type(error).__name__}: "
            f"{error}; is data.seq_len within the model's limit, and does it run with attention=eager?"
        ) from error
    finally:
        binder.close()
    return _scale(rows, lengths, num_sequences, seq_len, chunk_tokens)


class _Kept(NamedTuple):
    """What a unit's forward makes for its backward; see `Measured`."""

    num_bytes: int = 0
    needed: Needed | None = None
    yields: Yields = Yields(Yield(0, 0), Yield(0, 0), 0)
    num_saved: int = 0


@dataclass(slots=True)
class _Row:
    boundary: list[int]
    forward: list[Trace]
    backward: list[Trace]
    kept: list[_Kept]
    held: int
    shared: bool
    plain: bool
    glue: int = 0
    output: int = 0
    chunk_tokens: tuple[int, ...] = ()
    chunk: tuple[Trace, ...] = ()
    shifted: bool = True
    graph_matters: bool = False
    rest_users: set[int] = field(default_factory=set)
    random: bool = False


class _Pass:
    """One forward over the units at one length, each distinct unit measured forward and backward."""

    def __init__(
        self,
        split: Split,
        forwards: tuple[Callable[..., Any], ...],
        inputs: Mapping[str, Any],
        chunk_tokens: int | None,
        ambient: Ambient,
    ) -> None:
        self._split = split
        self._forwards = tuple(_within(ambient, forward) for forward in forwards)
        self._ambient = ambient
        self._inputs = dict(inputs)
        self._chunk_tokens = chunk_tokens
        self._known: dict[Any, tuple[Trace, Trace, _Kept, Any]] = {}
        self._row = _Row([], [], [], [], 0, False, False)
        self._uses = GlueUses(split)

    def run(self, weights: torch.UntypedStorage) -> _Row:
        live = LiveBytes(weights)
        walk = Walk(self._split.model, self._inputs)
        last = len(self._forwards) - 1
        storages: list[Tensor] = []
        several = False
        outputs: Any = None
        try:
            with live, torch.enable_grad():
                for unit in range(last + 1):
                    if unit == last:
                        handed = sum(t.untyped_storage().nbytes() for t in _tensors(outputs))
                        self._row.held = max(live.restart() - sum(self._row.boundary) - handed, 0)
                    call = self._advance(walk, unit, outputs)
                    if not isinstance(call, UnitCall) or call.unit != unit:
                        raise ModelError(
                            f"the model does not call unit {self._split.spec.units[unit].name} in its turn; outsize "
                            "streams models that call each of their units once per forward, in order. Where the "
                            'forward takes the weight of the head itself (TRL): outsize.wrap(..., head="resident")'
                        )
                    received = self._receive(call)
                    several = several or len(received) > 1
                    storages += received
                    if unit == last:
                        self._last(unit, call, walk, live)
                    else:
                        outputs = self._unit(unit, call, live)
        finally:
            walk.close()
            live.forget()
        pointers = [tensor.untyped_storage().data_ptr() for tensor in storages]
        self._row.shared = len(set(pointers)) < len(pointers) or several
        self._row.rest_users = {min(unit, last) for unit in self._uses.found} | units_that_share(self._split)
        return self._row

    def _advance(self, walk: Walk, unit: int, outputs: Any) -> UnitCall | Finished:
        """Go on to ``unit``, and note what the model's own code uses on the way."""
        self._uses.unit = unit
        state = torch.get_rng_state()
        with self._ambient(), self._uses:
            call = walk.advance(outputs)
        self._note_random(state)
        return call

    def _note_random(self, before: Tensor) -> None:
        self._row.random |= not torch.equal(before, torch.get_rng_state())

    def _receive(self, call: UnitCall) -> list[Tensor]:
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        tensors = [leaf for leaf in leaves if is_differentiable(leaf) and leaf.requires_grad]
        unique = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._row.boundary.append(sum(tensor.untyped_storage().nbytes() for tensor in unique.values()))
        return list(unique.values())

    def _unit(self, unit: int, call: UnitCall, live: LiveBytes) -> Any:
        spec = self._split.spec.units[unit]
        shapes = tuple((tensor.shape, tensor.trainable) for tensor in spec.all_tensors)
        key = (type(self._split.modules[unit]), shapes, signature(call))
        if key in self._known:
            forward, backward, kept, outputs = self._known[key]
        else:
            before = live.restart()
            state = torch.get_rng_state()
            with torch.no_grad():
                outputs = self._forwards[unit](*call.args, **call.kwargs)
            forward = live.since(before)
            self._note_random(state)
            torch.set_rng_state(state)
            before = live.restart()
            same, kept = self._backward(unit, call, live, outputs)
            backward = live.since(before)
            self._row.graph_matters |= not same
            outputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("meta"), outputs)
            self._known[key] = forward, backward, kept, outputs
        self._row.forward.append(forward)
        self._row.backward.append(backward)
        self._row.kept.append(kept)
        fresh = pytree.tree_map_only(Tensor, _like, outputs)
        return hand_out(fresh, tracked=True)[0]

    def _backward(
        self, unit: int, call: UnitCall, live: LiveBytes, expected: Any = None
    ) -> tuple[bool, _Kept]:
        """Run the unit with a graph and backward.

        Returns:
            Whether it gave what was expected, bit for bit; and what it saved for its backward.
        """
        before = live.now
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda t: t.detach().requires_grad_() if t.requires_grad else t,
            (call.args, call.kwargs),
        )
        trial = Trial([], [])
        live.ops = trial.ops
        returned = YieldTrial(trial.ops)
        with trial.hooks(), returned.watching():
            outputs = self._forwards[unit](*args, **kwargs)
        live.ops = None
        given = {_place(tensor) for tensor in _tensors((args, kwargs))}
        made = {_place(t): t.untyped_storage().nbytes() for t in _tensors(outputs) if _place(t) not in given}
        saved = max(live.now - before - sum(made.values()), 0)
        leaves = [leaf for leaf in _tensors(outputs) if is_differentiable(leaf)]
        del outputs
        others = [t for t in pytree.tree_leaves(expected) if is_differentiable(t)]
        same = all(torch.equal(one, other) for one, other in zip(leaves, others, strict=False))
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if wanted:
            torch.autograd.backward(wanted, [torch.zeros_like(leaf) for leaf in wanted])
        last_needed = trial.saved_at[-1] if trial.saved_at else 0
        yields = returned.yields(last_needed, given | made.keys())
        return same, _Kept(saved, trial.needed(), yields, len(trial.saved_at))

    def _last(self, unit: int, call: UnitCall, walk: Walk, live: LiveBytes) -> None:
        before, glue = live.now, live.peak - live.now
        forward = self._forwards[unit]
        with torch.no_grad():
            state = torch.get_rng_state()
            made = forward(*call.args, **call.kwargs)
            self._note_random(state)
            outputs = pytree.tree_map_only(Tensor, _like, made)
            del made
            ending = self._advance(walk, unit + 1, outputs)
        if isinstance(ending, Finished):
            self._row.output = sum(tensor.nbytes for tensor in _tensors(ending.output))
            self._row.plain = self._is_plain(outputs, ending.output)
            self._row.shifted = self._is_shifted(ending.output)
        del outputs
        self._row.forward.append(())
        self._row.kept.append(_Kept())
        self._row.glue = max(glue, 0)
        if self._chunk_tokens is not None and self._row.plain:
            del ending
            hidden = next(t for t in pytree.tree_leaves((call.args, call.kwargs)) if is_differentiable(t))
            self._chunk(forward, hidden.detach().flatten(0, -2), live)
            self._row.backward.append(())
            return
        live.restart()
        loss = 0
        if isinstance(ending, Finished):
            _, kept = self._backward(unit, call, live)
            self._row.kept[-1] = kept
            # What the loss adds: logits in fp32, their softmax and their gradient.
            logits = getattr(ending.output, "logits", None)
            loss = 3 * 4 * logits.numel() if isinstance(logits, Tensor) else 0
        self._row.backward.append(live.since(before - loss))

    def _chunk(self, forward: Callable[..., Any], hidden: Tensor, live: LiveBytes) -> None:
        """Measure a chunk of the loss at two numbers of tokens."""
        targets = shift_labels(self._inputs["labels"])
        self._row.chunk_tokens = (max(len(hidden) // 2, 1), len(hidden))
        for count in self._row.chunk_tokens:
            before = live.restart()
            chunked_head_loss(forward, hidden[:count], targets[:count], 1.0, count)
            self._row.chunk += (live.since(before),)

    def _is_plain(self, head_output: Any, output: Any) -> bool:
        """Whether nothing but a shifted mean cross-entropy follows the head, judged on made-up logits."""
        logits = getattr(output, "logits", None)
        if (
            not isinstance(head_output, Tensor)
            or not isinstance(logits, Tensor)
            or "labels" not in self._inputs
        ):
            return False
        if logits.shape != head_output.shape or not torch.equal(logits, head_output):
            return False
        ours = _cross_entropy(logits, shift_labels(self._inputs["labels"]))
        return bool(torch.isclose(ours, loss_of(output).float(), rtol=1e-4, atol=1e-5))

    def _is_shifted(self, output: Any) -> bool:
        """Whether the loss is nearer to that of the next token than to that of the token in its place."""
        logits, labels = getattr(output, "logits", None), self._inputs.get("labels")
        if labels is None or not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
            return True
        loss = loss_of(output).float()
        here, following = _cross_entropy(logits, labels), _cross_entropy(logits, shift_labels(labels))
        return bool((loss - following).abs() <= (loss - here).abs())


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1)
    )


def _within(ambient: Ambient, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with ambient():
            return forward(*args, **kwargs)

    return run


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def signature(call: UnitCall) -> Any:
    """What tells calls of different form apart: nesting, shapes and dtypes of tensors, types of the rest."""
    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    forms = [
        (leaf.shape, leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else type(leaf)
        for leaf in leaves
    ]
    return (str(structure), tuple(forms))


def _like(tensor: Tensor) -> Tensor:
    made = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return made.normal_(0.0, 0.5) if made.is_floating_point() else made


def _lengths(seq_len: int, num_sequences: int) -> tuple[int, ...]:
    """The lengths to run: the real one where it is short, and more of them where several sequences are asked for."""
    if seq_len > SHORT_LENGTHS[-1]:
        return SHORT_LENGTHS
    return (seq_len,) if num_sequences == 1 or seq_len < 4 else (seq_len // 4, seq_len // 2, seq_len)


def _scale(
    rows: list[_Row], lengths: tuple[int, ...], num_sequences: int, seq_len: int, chunk_tokens: int | None
) -> Measured:
    def at(values: Iterable[Trace]) -> int:
        return extrapolate(lengths, tuple(values), seq_len, num_sequences)

    last, kept = rows[-1], list(zip(*(row.kept for row in rows), strict=True))
    boundary = tuple(at((row.boundary[unit],) for row in rows) for unit in range(len(last.boundary)))
    backward = [at(row.backward[unit] for row in rows) for unit in range(len(boundary))]
    if chunk_tokens is not None and last.plain:
        count = min(num_sequences * seq_len, chunk_tokens)
        backward[-1] = extrapolate(last.chunk_tokens, last.chunk, count) + 3 * boundary[-1]
    backward[-1] += at((row.glue,) for row in rows)
    return Measured(
        boundary_bytes=boundary,
        forward_bytes=tuple(at(row.forward[unit] for row in rows) for unit in range(len(boundary))),
        backward_bytes=tuple(backward),
        saved_bytes=tuple(at((one.num_bytes,) for one in unit) for unit in kept),
        output_bytes=at((row.output,) for row in rows),
        held_bytes=at((row.held,) for row in rows),
        inputs_shared=rows[0].shared,
        plain_head=rows[0].plain,
        shifted=rows[0].shifted,
        graph_matters=any(row.graph_matters for row in rows),
        rest_users=frozenset().union(*(row.rest_users for row in rows)),
        draws_random=any(row.random for row in rows),
        needed=_same_needs(rows),
        attention=tuple(_yield([one.yields.attention for one in unit], at) for unit in kept),
        products=tuple(_yield([one.yields.products for one in unit], at) for unit in kept),
        num_products=_same_counts(kept),
        num_saved=tuple(max(one.num_saved for one in unit) for unit in kept),
        num_sequences=num_sequences,
        seq_len=seq_len,
    )


def _yield(lengths: Sequence[Yield], at: Callable[[Iterable[Trace]], int]) -> Yield:
    return Yield(*(at((one[part],) for one in lengths) for part in range(2)))


def _same_counts(kept: Sequence[Sequence[_Kept]]) -> dict[int, int]:
    counts = enumerate({one.yields.num_products for one in unit} for unit in kept)
    return {unit: found.pop() for unit, found in counts if len(found) == 1}


def _same_needs(rows: list[_Row]) -> dict[int, Needed]:
    """What recomputes of units need, where that is the same at all lengths."""
    found = [[one.needed for one in row.kept] for row in rows]
    return {
        unit: first
        for unit, (first, *others) in enumerate(zip(*found, strict=True))
        if first is not None and all(other == first for other in others)
    }
