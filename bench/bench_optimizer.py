"""Is the optimizer's step over split masters as fast as memory allows, and as torch's own on fp32 masters?

Every form steps the same number of parameters, in turn, round after round; medians, and ratios within the run. All
planes lie as the engine's do, in an arena with huge pages. The bound is the memory, told in three ways: a triad, a = b
+ s c, whose bytes are counted as STREAM counts them, without the read of ``a`` that the processor makes before it
writes; the same in place, a = a + s c, which needs no such read, as a step needs none; and the exact form's own planes,
each read, changed by one addition and written, as same_streams.c does: what memory gives a step that computes nothing.
Targets: exact at least as fast as torch's fused AdamW and the cast to bf16 that it replaces; 80 % of the triad's bytes
per second for its own bytes; 8-bit moments at least 0.8 times the exact rate.

    python bench/bench_optimizer.py --output bench/results/optimizer_2core.json

Needs a quiet machine, 3 GB of memory and under three minutes, most of them for torch.compile (--no-compile).
"""

import argparse
import ctypes
import dataclasses
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from math import sqrt
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
from torch import Tensor

from outsize import native
from outsize.model.sizes.model_spec import UnitSpec, pack_unit
from outsize.optim.adamw import PlaneAdamW, agrees_with_torch
from outsize.optim.optimizer_spec import BLOCK_ELEMENTS
from outsize.optim.planes import StatePlanes
from outsize.optim.split_masters import join_master, split_master, ties_bytes
from outsize.optim.step import step_state
from outsize.storage.ledger import Arena

RULE, LR, STEP = PlaneAdamW(weight_decay=0.1), 1e-4, 5
ITEMS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
TILE = 2**17
ARENA = Arena()  # for as long as the process lives
# Of these alone are few rounds: they are several times slower.
FALLBACKS = "torch ops"
SAME = "the exact form's planes, read and written"


@dataclass(frozen=True)
class Form:
    """A way to step.

    Attributes:
        run: steps all parameters once.
        moved: bytes per parameter that it reads and writes, each plane once.
        kept: bytes per parameter that stay at home, the gradient not counted.
    """

    run: Callable[[], object]
    moved: float
    kept: float


def zeros(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """As the engine has its planes: in huge pages, every one of them touched."""
    return ARENA.take(numel * dtype.itemsize, "bench").view(dtype).zero_()


def planes_of(
    numel: int, moments: str, num_moments: int = 2, low_dtype: torch.dtype = torch.int16
) -> StatePlanes:
    weights, low = zeros(numel, torch.bfloat16), zeros(numel, low_dtype)
    ties = zeros(ties_bytes(numel), torch.uint8) if moments == "fp32" and low_dtype is torch.int16 else None
    split_master(torch.randn(numel), weights, low, ties)
    state = {name: zeros(numel, ITEMS[moments]) for name in ("exp_avg", "exp_avg_sq")[:num_moments]}
    if moments == "int8":
        state |= {f"{name}_scales": zeros(numel // BLOCK_ELEMENTS, torch.uint8) for name in list(state)}
    return StatePlanes(weights=weights, master_low=low, master_ties=ties, **state)


def in_torch_ops(run: Callable[[], None]) -> Callable[[], None]:
    """The same without kernels in C."""

    def plain() -> None:
        with mock.patch.object(native, "available", return_value=False):
            run()

    return plain


def bytes_per_element(planes: StatePlanes) -> float:
    """Bytes of all planes."""
    found = [
        *(getattr(planes, each.name) for each in fields(planes) if each.name != "others"),
        *planes.others.values(),
    ]
    return sum(plane.nbytes for plane in found if plane is not None) / planes.numel


def stepper(unit: UnitSpec, planes: StatePlanes, gradient: Tensor) -> Form:
    def run() -> None:
        step_state(RULE, unit, planes, gradient, start=0, step=STEP, lr=LR, seed=1)

    kept = bytes_per_element(planes)
    # The bits of ties are touched at one element in 65,536.
    moved = 2 * (kept - (0.125 if planes.master_ties is not None else 0.0)) + gradient.element_size()
    return Form(run, moved, kept)


def fused(master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    torch._fused_adamw_(
        [master], [gradient], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(STEP))], amsgrad=False, lr=LR,
        beta1=RULE.betas[0], beta2=RULE.betas[1], weight_decay=RULE.weight_decay, eps=RULE.eps, maximize=False,
    )  # fmt: skip


def resident(numel: int, gradient: Tensor) -> Form:
    """What is replaced: fp32 masters under torch's fused AdamW, then the cast to bf16."""
    master, exp_avg, exp_avg_sq = (zeros(numel) for _ in range(3))
    master.normal_()
    weights = zeros(numel, torch.bfloat16)

    def run() -> None:
        fused(master, gradient, exp_avg, exp_avg_sq)
        weights.copy_(master)

    return Form(run, 34.0, 14.0)


def around_torch(planes: StatePlanes, gradient: Tensor) -> Form:
    """The kernels that join and split, around torch's fused AdamW on tiles that stay in a cache."""
    assert planes.master_low is not None
    assert planes.exp_avg is not None
    assert planes.exp_avg_sq is not None
    low, exp_avg, exp_avg_sq = planes.master_low, planes.exp_avg, planes.exp_avg_sq
    ties = planes.master_ties
    master, wide = torch.empty(TILE), torch.empty(TILE)

    def run() -> None:
        for at in range(0, planes.numel, TILE):
            part, size = slice(at, at + TILE), min(TILE, planes.numel - at)
            bits = None if ties is None else ties[at // 8 : -(-(at + size) // 8)]
            join_master(planes.weights[part], low[part], bits, master[:size])
            wide[:size].copy_(gradient[part])
            fused(master[:size], wide[:size], exp_avg[part], exp_avg_sq[part])
            split_master(master[:size], planes.weights[part], low[part], bits)

    return Form(run, 26.0, bytes_per_element(planes))


def compiled(planes: StatePlanes, gradient: Tensor) -> Form:
    """The same in torch ops that inductor fuses; without ties."""
    assert planes.master_low is not None
    assert planes.exp_avg is not None
    assert planes.exp_avg_sq is not None
    arguments = (
        planes.weights.view(torch.int16),
        planes.master_low,
        gradient,
        planes.exp_avg,
        planes.exp_avg_sq,
    )
    beta1, beta2 = RULE.betas
    correction, step = sqrt(1 - beta2**STEP), -LR / (1 - beta1**STEP)

    def plain(hi: Tensor, lo: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        master = ((hi.to(torch.int32) << 16) + lo.to(torch.int32)).view(torch.float32)
        g = gradient.to(torch.float32)
        m = exp_avg + (1 - beta1) * (g - exp_avg)
        v = exp_avg_sq * beta2 + (1 - beta2) * g * g
        master = master * (1 - LR * RULE.weight_decay) + step * m / (v.sqrt() / correction + RULE.eps)
        bits = master.view(torch.int32)
        hi.copy_((bits + 0x7FFF + (bits >> 16 & 1) >> 16).to(torch.int16))
        lo.copy_(bits.to(torch.int16))
        exp_avg.copy_(m)
        exp_avg_sq.copy_(v)

    form = torch.compile(plain)
    form(*arguments)
    return Form(lambda: form(*arguments), 26.0, bytes_per_element(planes))


def triad(numel: int) -> Form:
    a, b, c = (zeros(numel // 2, torch.float64).fill_(1.0) for _ in range(3))
    return Form(lambda: torch.add(b, c, alpha=3.0, out=a), 12.0, 0.0)


def in_place(numel: int) -> Form:
    a, b = (zeros(numel // 2, torch.float64).fill_(1.0) for _ in range(2))
    return Form(lambda: a.add_(b, alpha=1e-9), 12.0, 0.0)


def same_streams(numel: int, threads: int) -> Form | None:
    """The planes of the exact form, changed by next to nothing; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source = Path(__file__).with_name("same_streams.c")
    with tempfile.TemporaryDirectory() as name:
        library = Path(name) / "same_streams.so"
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, source, "-o", library], check=True)
        handle = ctypes.CDLL(str(library))
    planes = [zeros(numel, dtype) for dtype in (torch.int16, torch.int16, torch.int16)]
    planes += [zeros(numel), zeros(numel)]
    arguments = [ctypes.c_void_p(plane.data_ptr()) for plane in planes]
    return Form(
        lambda: handle.same_streams(*arguments, ctypes.c_size_t(numel), ctypes.c_int(threads)), 26.0, 0.0
    )


def forms_of(numel: int, threads: int, *, compile_too: bool) -> dict[str, Form]:
    unit = pack_unit(0, "bench", "block", [("weight", (numel,), True, True)])
    wide, narrow = zeros(numel).normal_().mul_(1e-3), zeros(numel, torch.bfloat16)
    narrow.copy_(wide)
    streams = same_streams(numel, threads)
    exact, bf16, int8 = (planes_of(numel, moments) for moments in ("fp32", "bf16", "int8"))
    five_bytes = planes_of(numel, "int8", low_dtype=torch.int8)
    forms = {
        "triad": triad(numel),
        "triad in place": in_place(numel),
        **({} if streams is None else {SAME: streams}),
        "torch fused fp32, cast": resident(numel, wide),
        "exact": stepper(unit, exact, narrow),
        "exact, fp32 gradient": stepper(unit, exact, wide),
        "bf16 moments": stepper(unit, bf16, narrow),
        "8-bit moments": stepper(unit, int8, narrow),
        "8-bit moments, split24": stepper(unit, five_bytes, narrow),
        "exact, kernels around torch's op": around_torch(exact, narrow),
    }
    if compile_too:
        try:
            forms["torch.compile, without ties"] = compiled(exact, narrow)
        except Exception as error:  # no compiler, or none that inductor likes
            print(f"torch.compile: {error}")
    slow = {"exact": exact, "8-bit moments": int8, "8-bit moments, split24": five_bytes}
    for name, planes in ((f"{name}, {FALLBACKS}", planes) for name, planes in slow.items()):
        form = stepper(unit, planes, narrow)
        forms[name] = dataclasses.replace(form, run=in_torch_ops(form.run))
    return forms


def measure(forms: dict[str, Form], rounds: int) -> dict[str, common.Spread]:
    """Return seconds per form, in turn: whatever else the machine does meets all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for number in range(-1, rounds):
        for name, form in forms.items():
            if FALLBACKS in name and number > 1:
                continue
            begun = time.perf_counter()
            form.run()
            if number >= 0:  # the first round warms up
                seconds[name].append(time.perf_counter() - begun)
    return {name: common.Spread.of(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parameters", type=int, default=2**25, help="a multiple of 2048, far beyond the caches"
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not native.available():
        raise SystemExit(f"no kernels to measure: {native.reason()}")
    forms = forms_of(args.parameters, args.threads, compile_too=args.compile)
    taken = measure(forms, args.rounds)
    rows: dict[str, dict[str, Any]] = {}
    bounds = {
        key: forms[name].moved * args.parameters / taken[name].median
        for key, name in (
            ("of_triad", "triad"),
            ("of_triad_in_place", "triad in place"),
            ("of_streams", SAME),
        )
        if name in forms
    }
    for name, form in forms.items():
        rate = args.parameters / taken[name].median
        rows[name] = {
            "params_per_s": rate,
            "bytes_moved": form.moved,
            "bytes_kept": form.kept,
            "bytes_per_s": rate * form.moved,
            **{key: rate * form.moved / bound for key, bound in bounds.items()},
            "spread": taken[name].relative,
        }
    common.print_table(
        (
            "form",
            "G params/s",
            "spread",
            "bytes moved",
            "bytes kept",
            "GB/s",
            *(key.replace("_", " ") for key in bounds),
        ),
        [
            (
                name,
                f"{row['params_per_s'] / 1e9:.3f}",
                f"{row['spread']:.0%}",
                f"{row['bytes_moved']:.2f}",
                f"{row['bytes_kept']:.3f}" if row["bytes_kept"] else None,
                f"{row['bytes_per_s'] / 1e9:.1f}",
                *(f"{row[key]:.2f}" for key in bounds),
            )
            for name, row in rows.items()
        ],
    )
    rates = {name: row["params_per_s"] for name, row in rows.items()}
    common.finish(
        {
            "bench": "optimizer",
            "machine": common.machine(),
            "threads": args.threads,
            "instructions": native.level(),
            "kernel_is_torchs": agrees_with_torch(native.level()),
            "parameters": args.parameters,
            "forms": rows,
            "exact_of_torch": rates["exact"] / rates["torch fused fp32, cast"],
            "exact_of_triad": rows["exact"]["of_triad"],
            "exact_of_streams": rows["exact"].get("of_streams"),
            "eight_bits_of_exact": rates["8-bit moments"] / rates["exact"],
        },
        args.output,
    )


if __name__ == "__main__":
    main()
