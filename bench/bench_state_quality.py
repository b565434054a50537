"""What does optimizer state of fewer bits do to a run? Loss curves of a small GPT on real text, against fp32 state.

A GPT-2 of three blocks learns the source of Python's standard library, byte by byte, with AdamW: from the same weights
and on the same batches with moments in fp32, bf16 and 8 bits. Target, over three seeds: within 0.5 % of the loss with
fp32 state after 1,000 steps, at the end of which the learning rate is zero. How much of a difference is chance shows a
run with fp32 state whose first weights differ in their last bits.

Beside them, for the choice of the format, what other 8-bit moments would do: the codes of bitsandbytes and torchao
(dynamic map, blocks of 256, to nearest), ours to nearest, and ours with 16 octaves for the second moment, not 32. Ten
minutes of one processor.

    OMP_NUM_THREADS=1 nice python bench/bench_state_quality.py --output bench/results/state_quality.json
"""

import argparse
import statistics
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from outsize.model.spec import UnitSpec, pack_unit
from outsize.optim import moments
from outsize.optim.adamw import AdamW
from outsize.optim.planes import StatePlanes
from outsize.optim.spec import BLOCK_ELEMENTS
from outsize.optim.step import step_state

WIDTH, BLOCKS, SEQ_LEN, SEQUENCES = 64, 3, 64, 8
NUM_BYTES = 2_000_000
LR, WARMUP = 1e-3, 20
# Losses are means over so many last steps: single ones jump from batch to batch.
WINDOW = 50
CURVE_POINTS = 50
DYNAMIC_BLOCK = 256
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
# The same run but for the last bits of its first weights: what differs then is chance.
CONTROL, NUDGE = "fp32, first weights nudged", 2.0**-20
# Rounds moments (first, second) in place after each step; the state is fp32 otherwise.
Rounding = Callable[[StatePlanes, int], None]


def dynamic_map(signed: bool) -> Tensor:
    """The codes of Dettmers et al., arXiv:2110.02861: seven decades, each with twice the codes of the one below."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def to_dynamic(plane: Tensor, codes: Tensor) -> None:
    blocks = torch.nn.functional.pad(plane, (0, -plane.numel() % DYNAMIC_BLOCK)).view(-1, DYNAMIC_BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    scaled = blocks / scale.clamp_min(1e-38)
    nearest = torch.bucketize(scaled, (codes[1:] + codes[:-1]) / 2)
    plane.copy_((codes[nearest] * scale).view(-1)[: plane.numel()])


def dynamic(planes: StatePlanes, step: int) -> None:
    assert planes.exp_avg is not None
    assert planes.exp_avg_sq is not None
    to_dynamic(planes.exp_avg, dynamic_map(True))
    to_dynamic(planes.exp_avg_sq, dynamic_map(False))


def other(second: tuple[int, bool], *, nearest: bool) -> Rounding:
    """Ours with another form of the second moment, or to the nearest code."""

    def rounded(planes: StatePlanes, step: int) -> None:
        chances = moments.halves(moments.chances(0, moments.chance_key(0, 0, step), planes.numel))
        pairs = ((planes.exp_avg, moments.EXP_AVG_FORM), (planes.exp_avg_sq, second))
        for chance, (plane, form) in zip(chances, pairs, strict=True):
            assert plane is not None
            codes = torch.empty(planes.numel, dtype=torch.uint8)
            tops = torch.empty(-(-planes.numel // BLOCK_ELEMENTS), dtype=torch.uint8)
            part = torch.full_like(chance, 0x8000) if nearest else chance
            moments.to_codes(plane, part, form, codes, tops)
            plane.copy_(moments.from_codes(codes, tops, form))

    return rounded


VARIANTS: dict[str, tuple[str, Rounding | None]] = {
    "fp32": ("fp32", None),
    CONTROL: ("fp32", None),
    "bf16": ("bf16", None),
    "8 bits": ("int8", None),
    "8 bits, dynamic map to nearest": ("fp32", dynamic),
    "8 bits, ours to nearest": ("fp32", other(moments.EXP_AVG_SQ_FORM, nearest=True)),
    "8 bits, 16 octaves": ("fp32", other((4, False), nearest=False)),
}


def fresh_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    shape = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 4, "vocab_size": 256, "n_positions": SEQ_LEN}
    config = GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return AutoModelForCausalLM.from_config(config)


def text() -> Tensor:
    found = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += path.read_bytes()
    return torch.frombuffer(found[:NUM_BYTES], dtype=torch.uint8).long()


def flattened(model: torch.nn.Module) -> tuple[UnitSpec, Tensor, Tensor]:
    """Return all parameters as one unit, its weights and its gradient; the model's own become views of them."""
    named = dict(model.named_parameters())
    unit = pack_unit(0, "model", "block", [(n, tuple(p.shape), True, p.dim() > 1) for n, p in named.items()])
    weights, gradient = torch.zeros(unit.numel), torch.zeros(unit.numel)
    for tensor in unit.tensors:
        parameter = named[tensor.name]
        part = slice(tensor.offset, tensor.offset + tensor.numel)
        weights[part] = parameter.detach().flatten()
        parameter.data = weights[part].view(tensor.shape)
        parameter.grad = gradient[part].view(tensor.shape)
    return unit, weights, gradient


def losses(seed: int, steps: int, variant: str, corpus: Tensor) -> list[float]:
    kind, rounding = VARIANTS[variant]
    model = fresh_model(seed)
    unit, weights, gradient = flattened(model)
    if variant == CONTROL:
        weights *= 1.0 + NUDGE
    state = {name: torch.zeros(unit.numel, dtype=FORMATS[kind]) for name in ("exp_avg", "exp_avg_sq")}
    if kind == "int8":
        tops = unit.numel // BLOCK_ELEMENTS
        state |= {f"{name}_scales": torch.zeros(tops, dtype=torch.uint8) for name in list(state)}
    planes = StatePlanes(weights=weights, **state)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(1, steps + 1):
        places = torch.randint(len(corpus) - SEQ_LEN, (SEQUENCES,), generator=generator)
        batch = torch.stack([corpus[place : place + SEQ_LEN] for place in places.tolist()])
        gradient.zero_()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        found.append(loss.item())
        lr = LR * min(1.0, step / WARMUP) * (1.0 - (step - 1) / steps)
        step_state(AdamW(), unit, planes, gradient, start=0, step=step, lr=lr, seed=seed)
        if rounding is not None:
            rounding(planes, step)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--states", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="fp32 among them"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    corpus, window = text(), min(WINDOW, args.steps)
    finals: dict[str, list[float]] = {name: [] for name in args.states}
    curves: list[dict[str, Any]] = []
    for seed in range(args.seeds):
        for name in args.states:
            found = losses(seed, args.steps, name, corpus)
            finals[name].append(statistics.fmean(found[-window:]))
            every = max(1, args.steps // CURVE_POINTS)
            points = [
                round(statistics.fmean(found[at : at + every]), 5) for at in range(0, len(found), every)
            ]
            curves.append({"seed": seed, "state": name, "every": every, "loss": points})
            print(f"seed {seed}, {name}: {finals[name][-1]:.4f}", file=sys.stderr)
    off = {
        name: [loss / exact - 1 for loss, exact in zip(values, finals["fp32"], strict=True)]
        for name, values in finals.items()
    }
    common.print_table(
        ("state", f"loss of the last {window} steps", "off fp32 state, mean", "worst"),
        [
            (
                name,
                " ".join(f"{loss:.4f}" for loss in finals[name]),
                f"{statistics.fmean(off[name]):+.2%}",
                f"{max(off[name], key=abs):+.2%}",
            )
            for name in args.states
        ],
    )
    common.finish(
        {
            "bench": "state_quality",
            "machine": common.machine(),
            "steps": args.steps,
            "finals": finals,
            "off": off,
            "curves": curves,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
