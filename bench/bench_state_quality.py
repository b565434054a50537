"""What does optimizer state of fewer bits do to a run? Loss curves of a small GPT on real text, against fp32 state.

A GPT-2 of three blocks (`quality`) trains with AdamW from the same weights and on the same batches, with moments in
fp32, bf16 and 8 bits. Target, over three seeds: within 0.5 % of the loss with
fp32 state after 1,000 steps, at the end of which the learning rate is zero. How much of a difference is chance shows a
run with fp32 state whose first weights differ in their last bits.

Beside them, for the choice of the format, what other 8-bit moments would do: the codes of bitsandbytes and torchao
(dynamic map, blocks of 256, to nearest), ours to nearest, and ours with 16 octaves for the second moment, not 32. And
Muon on matrices of blocks at the same learning rate, with its momentum in each form. A quarter of an hour of one
processor.

Masters of 24 bits (`optimizer.masters: split24`) are held against exact masters beside bf16 weights, with which the
model computes in fp32: what differs is what is kept. Target: within 0.2 %, with 8-bit moments and without.

    OMP_NUM_THREADS=1 nice python bench/bench_state_quality.py --output bench/results/state_quality.json
    OMP_NUM_THREADS=1 nice python bench/bench_state_quality.py --output bench/results/state_quality_split24.json \
        --states "bf16 weights" "bf16 weights, nudged" "bf16 weights, 8-bit moments" split24 "split24, 8-bit moments"
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import quality
import torch
from quality import SEQ_LEN, SEQUENCES
from torch import Tensor

from outsize.model.sizes.model_spec import ModelSpec, UnitSpec, pack_unit
from outsize.optim import split_masters
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.muon import Muon
from outsize.optim.optimizer_spec import BLOCK_ELEMENTS, GRADIENT, WEIGHTS, StateLayout
from outsize.optim.planes import StatePlanes, chance_key
from outsize.optim.split_masters import split_master, ties_bytes
from outsize.optim.step import step_state, step_whole
from outsize.storage.home_layout import ITEM_DTYPE

LR, WARMUP = 1e-3, 20
DYNAMIC_BLOCK = 256
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
# The same run but for the last bits of its first weights: what differs then is chance.
CONTROL, NUDGE = "fp32, first weights nudged", 2.0**-20
# The same beside masters of 24 bits: weights in bf16 make more of a difference in the last of these.
CONTROL24, NUDGE24 = "bf16 weights, nudged", 2.0**-16
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
        chances = split_masters.halves(split_masters.chances(0, chance_key(0, 0, step), planes.numel))
        pairs = ((planes.exp_avg, split_masters.EXP_AVG_FORM), (planes.exp_avg_sq, second))
        for chance, (plane, form) in zip(chances, pairs, strict=True):
            assert plane is not None
            codes = torch.empty(planes.numel, dtype=torch.uint8)
            tops = torch.empty(-(-planes.numel // BLOCK_ELEMENTS), dtype=torch.uint8)
            part = torch.full_like(chance, 0x8000) if nearest else chance
            split_masters.to_codes(plane, part, form, codes, tops)
            plane.copy_(split_masters.from_codes(codes, tops, form))

    return rounded


# Variants with bf16 weights: of what their moments are, and what is kept below the weights.
BELOW: dict[str, tuple[str, torch.dtype]] = {
    "bf16 weights": ("fp32", torch.int16),
    CONTROL24: ("fp32", torch.int16),
    "bf16 weights, 8-bit moments": ("int8", torch.int16),
    "split24": ("fp32", torch.int8),
    "split24, 8-bit moments": ("int8", torch.int8),
}
VARIANTS: dict[str, tuple[str, Rounding | None]] = {
    "fp32": ("fp32", None),
    CONTROL: ("fp32", None),
    "bf16": ("bf16", None),
    "8 bits": ("int8", None),
    "8 bits, dynamic map to nearest": ("fp32", dynamic),
    "8 bits, ours to nearest": ("fp32", other(split_masters.EXP_AVG_SQ_FORM, nearest=True)),
    "8 bits, 16 octaves": ("fp32", other((4, False), nearest=False)),
    **{name: (kind, None) for name, (kind, _) in BELOW.items()},
}

MUONS = {"Muon": "fp32", "Muon, bf16": "bf16", "Muon, 8 bits": "int8"}
# Steps by a number and a learning rate.
Step = Callable[[int, float], None]


def adamw_step(variant: str, unit: UnitSpec, weights: Tensor, gradient: Tensor, seed: int) -> Step:
    kind, rounding = VARIANTS[variant]
    state = {name: torch.zeros(unit.numel, dtype=FORMATS[kind]) for name in ("exp_avg", "exp_avg_sq")}
    if kind == "int8":
        tops = unit.numel // BLOCK_ELEMENTS
        state |= {f"{name}_scales": torch.zeros(tops, dtype=torch.uint8) for name in list(state)}
    if variant in BELOW:
        state["master_low"] = torch.empty(unit.numel, dtype=BELOW[variant][1])
        if BELOW[variant] == BELOW["bf16 weights"]:
            state["master_ties"] = torch.zeros(ties_bytes(unit.numel), dtype=torch.uint8)
        upper = weights.bfloat16()
        split_master(weights, upper, state["master_low"], state.get("master_ties"))
        weights.copy_(upper)
    planes = StatePlanes(weights=upper if variant in BELOW else weights, **state)

    def step(number: int, lr: float) -> None:
        step_state(PlaneAdamW(), unit, planes, gradient, start=0, step=number, lr=lr, seed=seed)
        if rounding is not None:
            rounding(planes, number)
        if planes.weights is not weights:
            weights.copy_(planes.weights)

    return step


def muon_step(variant: str, unit: UnitSpec, weights: Tensor, gradient: Tensor, seed: int) -> Step:
    """Of matrices of blocks; with the weight decay of the others."""
    tensors = tuple(replace(tensor, muon=".h." in tensor.name) for tensor in unit.tensors)
    unit, rule = replace(unit, tensors=tensors), Muon(weight_decay=PlaneAdamW().weight_decay)
    layout = StateLayout(dtype="fp32", moments=MUONS[variant], newton_schulz=rule.ns_steps)
    planes = {n: torch.zeros(p.items_of(unit), dtype=ITEM_DTYPE[p.item]) for n, p in layout.planes.items()}
    planes |= {WEIGHTS: weights, GRADIENT: gradient}
    scratch = torch.zeros(layout.scratch_elements(ModelSpec(units=(unit,), dtype="fp32")))

    def step(number: int, lr: float) -> None:
        counts = {tensor.name: number for tensor in tensors}
        step_whole(rule, unit, planes, [scratch], step=counts, lr=lr, seed=seed)

    return step


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
    model = quality.fresh_model(seed)
    unit, weights, gradient = flattened(model)
    if variant == CONTROL:
        weights *= 1.0 + NUDGE
    if variant == CONTROL24:
        weights *= 1.0 + NUDGE24 * torch.randn(unit.numel, generator=torch.Generator().manual_seed(seed))
    take = (muon_step if variant in MUONS else adamw_step)(variant, unit, weights, gradient, seed)
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
        take(step, lr)
    return found


def runs(seed: int, steps: int, variants: Sequence[str], corpus: Tensor) -> Iterator[tuple[str, list[float]]]:
    for variant in variants:
        yield variant, losses(seed, steps, variant, corpus)


def main() -> None:
    parser = quality.arguments(__doc__)
    parser.add_argument(
        "--states",
        nargs="+",
        choices=[*VARIANTS, *MUONS],
        default=[*(name for name in VARIANTS if name not in BELOW), *MUONS],
        help="the first is the one that the others are held against",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    corpus = torch.frombuffer(quality.text(), dtype=torch.uint8).long()
    quality.compare("state", args.states[0], lambda seed: runs(seed, args.steps, args.states, corpus), args)


if __name__ == "__main__":
    main()
