"""Try whether a model keeps documents apart that share a sequence, by positions that restart at each border.

Transformers reads borders off position ids and makes masks of them, in the code of each architecture or not at all. So
nobody is asked for names: two documents, end to end, go through the model at random weights, and each by itself.

1. Where a unit takes hidden states, its backward for the tokens of one document must bring the other exactly nothing.
   A weight of zero stays zero in any dtype and by any kernel, so that nothing is near enough.
2. What units return must be what they return for each document by itself, or positions went on over the border.

As in `calibrate` units that are alike, and are called alike, are run once.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from outsize.compat import torch_private
from outsize.errors import ModelError
from outsize.model.split import Split
from outsize.model.walk import UnitCall, Walk
from outsize.runtime.forward.binding import Binder
from outsize.runtime.forward.unit_visit import Gradients, cut, hand_out, is_differentiable
from outsize.runtime.trial.calibrate import Discard
from outsize.runtime.trial.live_bytes import without_trace
from outsize.runtime.trial.unit_measure import signature
from outsize.runtime.trial.unit_trials import bind_trial_weights

# Tokens of the two documents.
_LENGTHS = (5, 3)
# How far outputs may be from those of a document by itself, as a share of the largest. Kernels round otherwise for
# other lengths, in bf16 by hundredths after a few units; other positions give other numbers altogether.
_NEAR = 0.1
# Large enough that products of several small numbers are no zeros in fp16, small enough that no sum is infinite there.
_DEVIATION = 0.1


def check_borders(split: Split, forwards: tuple[Callable[..., Any], ...], vocab_size: int) -> None:
    """Check that a model keeps the documents of a sequence apart.

    Args:
        split: the model; its boundaries must be in place.
        forwards: the units' own forwards.
        vocab_size: rows of its embedding.

    Raises:
        ModelError: it does not, or it cannot be shown.
    """
    # Kernels keep buffers for every thread that ever called them; those of this one go with it.
    with ThreadPoolExecutor(1, "borders") as thread:
        leak = thread.submit(_leak, split, forwards, vocab_size).result()
    if leak is not None:
        raise ModelError(
            f"data.pack: {type(split.model).__name__} cannot be shown to keep documents of one sequence apart: "
            f"{leak}; with data.pack=none each document has a sequence of its own, and with data.pack=stream tokens "
            "attend across documents"
        )


def _leak(split: Split, forwards: tuple[Callable[..., Any], ...], vocab_size: int) -> str | None:
    """Return where documents are not kept apart, in words."""
    binder = Binder(split, Discard())
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, vocab_size, (1, length), generator=generator) for length in _LENGTHS]
    positions = [torch.arange(length)[None] for length in _LENGTHS]
    trial = _BorderTrial(split, forwards)
    split.model.eval()  # as much is random as dropout makes it
    try:
        bind_trial_weights(binder, split.spec, deviation=_DEVIATION)
        with without_trace(split.model):
            trial.together(torch.cat(documents, 1), torch.cat(positions, 1))
            for ids, where in zip(documents, positions, strict=True):
                trial.alone(ids, where)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        split.model.train()
        binder.close()
    return trial.leak()


class _BorderTrial:
    """Passes over two documents end to end, and over each by itself."""

    def __init__(self, split: Split, forwards: tuple[Callable[..., Any], ...]) -> None:
        self._split = split
        self._forwards = forwards
        self._first: dict[Any, int] = {}  # of the units that are alike, the one that was run
        self._alike: dict[int, int] = {}  # for each unit
        self._leaking: str | None = None
        self._num_looked_at = 0
        self._outputs: list[list[list[Tensor]]] = []  # of each pass, of each unit

    def together(self, ids: Tensor, position_ids: Tensor) -> None:
        """Pass over documents end to end, and look for units in which one sees another."""

        def run(unit: int, call: UnitCall) -> Any:
            self._alike[unit] = self._first.setdefault(self._form(unit, call), unit)
            return self._watched(unit, call) if self._alike[unit] == unit else None

        with torch.enable_grad():
            self._pass(ids, position_ids, run)

    def alone(self, ids: Tensor, position_ids: Tensor) -> None:
        """Pass over one document."""

        def run(unit: int, call: UnitCall) -> Any:
            return self._forwards[unit](*call.args, **call.kwargs) if self._alike[unit] == unit else None

        with torch.no_grad():
            self._pass(ids, position_ids, run)

    def leak(self) -> str | None:
        """Return where documents were not kept apart, in words; None where they were."""
        if self._leaking is not None or not self._num_looked_at:
            return self._leaking or "no unit takes one hidden state for each token"
        for unit, (both, *each) in zip(self._alike, zip(*self._outputs, strict=True), strict=True):
            if not all(map(_is_near, both, map(torch.cat, zip(*each, strict=True)))):
                return f"positions go on over the border in {self._name(unit)}"
        return None

    def _pass(self, ids: Tensor, position_ids: Tensor, run: Callable[[int, UnitCall], Any]) -> None:
        walk = Walk(self._split.model, {"input_ids": ids, "position_ids": position_ids})
        outputs_by_form: dict[int, Any] = {}
        outputs: Any = None
        try:
            while isinstance(call := walk.advance(outputs), UnitCall):
                unit = call.unit
                one = run(unit, call)
                outputs_by_form[unit] = one = (
                    outputs_by_form[self._alike[unit]] if self._alike[unit] != unit else one
                )
                outputs = hand_out(one, Gradients(one)) if torch.is_grad_enabled() else cut(one)
        finally:
            walk.close()
        length = ids.shape[1]
        self._outputs.append(
            [[t.detach()[0] for t in _by_token(each, length)] for each in outputs_by_form.values()]
        )

    def _watched(self, unit: int, call: UnitCall) -> Any:
        """Run a unit on both documents, and note where a token of one depends on one of the other."""
        args, kwargs = torch_private.map_only(
            Tensor, lambda t: t.detach().requires_grad_() if t.requires_grad else t, (call.args, call.kwargs)
        )
        outputs = self._forwards[unit](*args, **kwargs)
        length, border = sum(_LENGTHS), _LENGTHS[0]
        inputs = [t for t in _by_token((args, kwargs), length) if t.requires_grad]
        ends = [t for t in _by_token(outputs, length) if t.requires_grad]
        if not inputs or not ends:
            return outputs
        self._num_looked_at += 1
        for side, other in ((slice(border), slice(border, None)), (slice(border, None), slice(border))):
            drawn = [torch.randn(t[:, side].shape, generator=torch.Generator().manual_seed(1)) for t in ends]
            gradients = torch.autograd.grad(
                [t[:, side] for t in ends],
                inputs,
                [one.to(t.dtype) for one, t in zip(drawn, ends, strict=True)],
                retain_graph=True,
                allow_unused=True,
            )
            if any(bool(t[:, other].any()) for t in gradients if t is not None):
                self._leaking = self._leaking or f"tokens see another document in {self._name(unit)}"
        return outputs

    def _form(self, unit: int, call: UnitCall) -> Any:
        """What units that are run once have in common: class, shapes, and the call, all but its hidden states."""
        shapes = tuple(tensor.shape for tensor in self._split.spec.units[unit].all_tensors)
        given = hashlib.blake2b()
        for leaf in torch_private.leaves_of((call.args, call.kwargs)):
            if isinstance(leaf, Tensor) and not leaf.requires_grad:
                given.update(leaf.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return (type(self._split.modules[unit]), shapes, signature(call), given.digest())

    def _name(self, unit: int) -> str:
        return self._split.spec.units[unit].name


def _by_token(values: Any, length: int) -> list[Tensor]:
    """Return the tensors that hold something for each token of one sequence."""
    leaves = torch_private.leaves_of(values)
    return [t for t in leaves if is_differentiable(t) and t.dim() > 1 and t.shape[:2] == (1, length)]


def _is_near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= _NEAR * other.abs().max())
