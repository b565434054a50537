"""What does a step of Adafactor over split masters take beside torch's own, and beside AdamW's?

Two matrices, stepped in turn, round after round; medians, and ratios within the run. Torch's Adafactor steps fp32
parameters, which are then cast to bf16: that is what it replaces. The pace is how fast a step moves its bytes beside
AdamW over split masters, of which the planner knows the rate of a machine: it is `FACTORED_PACE` in
`planner/simulate/costs.py`.

    python bench/bench_adafactor.py --output bench/results/adafactor_2core.json

Needs a quiet machine, 1 GB of memory and half a minute.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import common
import torch
from bench_optimizer import in_torch_ops, planes_of, stepper, zeros

from outsize import native
from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.optim.adafactor import Adafactor
from outsize.optim.factored_kernel import form_of_torch
from outsize.optim.optimizer_spec import GRADIENT, WEIGHTS, StateLayout
from outsize.optim.step import step_whole
from outsize.storage.home_layout import ITEM_DTYPE

NAMES, STEP, LR = ("one", "other"), 5, 1e-2
OURS, PLAIN, TORCH, ADAMW = (
    "split masters",
    "split masters, torch ops",
    "torch fp32, cast",
    "AdamW, split masters",
)


def forms_of(size: int) -> tuple[dict[str, Callable[[], object]], torch.Tensor, StateLayout]:
    """Return ways to step two square matrices, the gradient that they share, and how ours lie."""
    unit = pack_unit(0, "bench", "block", [(name, (size, size), True, True) for name in NAMES])
    layout = StateLayout(dtype="bf16", masters="split", gradients="none", num_moments=0, factored=True)
    planes = {
        name: zeros(plane.items_of(unit), ITEM_DTYPE[plane.item]) for name, plane in layout.planes.items()
    }
    planes[WEIGHTS].normal_()
    gradient = planes[GRADIENT] = zeros(unit.numel)
    elements = layout.scratch_elements(ModelSpec(units=(unit,), dtype="bf16"))
    scratches = [zeros(elements) for _ in range(layout.num_scratches)]
    counts = dict.fromkeys(NAMES, STEP)

    def ours() -> None:
        step_whole(Adafactor(), unit, planes, scratches, step=counts, lr=LR)

    parameters = [torch.nn.Parameter(zeros(size * size).normal_().view(size, size)) for _ in NAMES]
    cast = [zeros(size * size, torch.bfloat16).view(size, size) for _ in NAMES]
    for tensor, parameter in zip(unit.tensors, parameters, strict=True):
        parameter.grad = gradient[tensor.offset : tensor.offset + tensor.numel].view(size, size)
    optimizer = torch.optim.Adafactor(parameters, lr=LR)

    def theirs() -> None:
        optimizer.step()
        with torch.no_grad():
            for weights, parameter in zip(cast, parameters, strict=True):
                weights.copy_(parameter)

    forms = {
        OURS: ours,
        PLAIN: in_torch_ops(ours),
        TORCH: theirs,
        ADAMW: stepper(unit, planes_of(unit.numel, "fp32"), gradient).run,
    }
    return forms, gradient, layout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of each matrix")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not native.available():
        raise SystemExit(f"no kernels to measure: {native.reason()}")
    forms, gradient, layout = forms_of(args.size)
    fresh = torch.randn(gradient.numel()) * 1e-3
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(-1, args.rounds):
        for name, run in forms.items():
            if name == PLAIN and number > 1:  # many times slower
                continue
            gradient.copy_(fresh)  # ours leave the update there
            begun = time.perf_counter()
            run()
            if number >= 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - begun)
    taken = {name: common.Spread.of(values) for name, values in seconds.items()}
    rates = {name: gradient.numel() / spread.median for name, spread in taken.items()}
    common.print_table(
        ("form", "G params/s", "spread"),
        [(name, f"{rate / 1e9:.3f}", f"{taken[name].relative:.0%}") for name, rate in rates.items()],
    )
    adamw = StateLayout(dtype="bf16", masters="split", gradients="none")
    common.finish(
        {
            "bench": "adafactor",
            "machine": common.machine(),
            "threads": args.threads,
            "instructions": native.level(),
            "kernel_is_torchs": form_of_torch(native.level()) is not None,
            "parameters": gradient.numel(),
            "params_per_s": rates,
            "of_torch": rates[OURS] / rates[TORCH],
            "of_adamw": rates[OURS] / rates[ADAMW],
            "pace": rates[OURS] * layout.step_bytes / (rates[ADAMW] * adamw.step_bytes),
        },
        args.output,
    )


if __name__ == "__main__":
    main()
