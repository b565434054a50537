"""What a microbatch needs in device memory: measured on one unit of each kind, at a short length, and scaled.

Weights do not matter to sizes, so every unit is bound to one plane of small random numbers, as large as the largest
unit. Blocks of the same class and shapes that are called alike are run once; the others pass on tensors of that form.
Three short lengths are run, and `extrapolate` goes on from there.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from outsize.errors import ModelError, OutsizeError
from outsize.model.split import Split
from outsize.runtime.forward.binding import Binder
from outsize.runtime.forward.microbatch import Ambient
from outsize.runtime.trial.effects_trial import UnitEffects
from outsize.runtime.trial.extrapolate import trial_lengths
from outsize.runtime.trial.live_bytes import without_trace
from outsize.runtime.trial.measured import Measured, scale
from outsize.runtime.trial.trial_pass import TrialPass
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
                TrialPass(split, forwards, make_inputs(1, length), chunk_tokens, ambient, effects).run(
                    memory.untyped_storage()
                )
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
