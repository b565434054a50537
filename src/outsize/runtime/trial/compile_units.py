"""Have units compiled before the first step: for the microbatches of a run, with what needs gradients in it."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from outsize.model.compiled import is_compiled
from outsize.model.split import Split
from outsize.model.walk import Boundaries
from outsize.runtime.forward.binding import Binder, buffers_on
from outsize.runtime.forward.microbatch import MicrobatchRun
from outsize.runtime.ops.compute_ops import tracked_units
from outsize.runtime.trial.calibrate import Discard
from outsize.runtime.trial.live_bytes import without_trace
from outsize.runtime.trial.unit_trials import bind_trial_weights


def compile_units(split: Split, inputs: Mapping[str, Tensor], device: torch.device) -> None:
    """Have units compiled for microbatches such as ``inputs``: pass them once, with graphs, as a step does.

    Args:
        split: the model.
        inputs: of one microbatch, [B, S] each.
        device: that computes.
    """
    # What is compiled is for as many threads, and kernels keep buffers for every thread that ever called them.
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, "compile", lambda: torch.set_num_threads(num_threads)) as thread:
        thread.submit(_compile_units, split, inputs, device).result()


def _compile_units(split: Split, inputs: Mapping[str, Tensor], device: torch.device) -> None:
    binder = Binder(split, Discard())
    on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
    run = MicrobatchRun(split.model, on_device, tracked_units(split.spec), lambda *_: None)
    try:
        with (
            Boundaries(split.modules) as boundaries,
            buffers_on(split.model, device),
            without_trace(split.model, device),
        ):
            bind_trial_weights(binder, split.spec, device)
            compiled = [unit for unit, forward in enumerate(boundaries.forwards) if is_compiled(forward)]
            for unit in range(1 + max(compiled, default=-1)):
                run.forward(unit, boundaries.forwards[unit], graph=True)
                run.drop(unit)
    finally:
        run.close()
        binder.close()
