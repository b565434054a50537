"""How many elements may share an exponent? The error that 8-bit moments bring into a step of AdamW, by size of block.

The small GPT of bench_state_quality.py learns with moments in fp32. After some hundred steps its moments are written in
8 bits, in blocks of several sizes, and read again; the error is that of ``exp_avg / (sqrt(exp_avg_sq) + eps)``, the
direction of a step: root mean square over that of the exact one, for rounding by chance and to the nearest. Larger
blocks take fewer bytes and have more elements far below their largest, where codes end. Parameters begin at multiples
of 64 elements, so a larger block would span two of them, and one that does not step would lose bits. Results are the
same in every run; two minutes of one processor.

    OMP_NUM_THREADS=1 nice python bench/bench_state_blocks.py --output bench/results/state_blocks.json
"""

import argparse
from pathlib import Path
from typing import Any

import bench_state_quality
import common
import quality
import torch
from torch import Tensor

from outsize.optim import split_masters
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.planes import StatePlanes, chance_key
from outsize.optim.step import step_state

SIZES = (16, 32, 64, 128, 256, 1024, 4096)


def trained(steps: int, seed: int) -> StatePlanes:
    """Return the planes of the model after so many steps."""
    corpus = torch.frombuffer(quality.text(), dtype=torch.uint8).long()
    model = quality.fresh_model(seed)
    unit, weights, gradient = bench_state_quality.flattened(model)
    planes = StatePlanes(weights=weights, exp_avg=torch.zeros(unit.numel), exp_avg_sq=torch.zeros(unit.numel))
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        places = torch.randint(len(corpus) - quality.SEQ_LEN, (quality.SEQUENCES,), generator=generator)
        batch = torch.stack([corpus[place : place + quality.SEQ_LEN] for place in places.tolist()])
        gradient.zero_()
        model(input_ids=batch, labels=batch).loss.backward()
        lr = bench_state_quality.LR * min(1.0, step / bench_state_quality.WARMUP)
        step_state(PlaneAdamW(), unit, planes, gradient, start=0, step=step, lr=lr)
    return planes


def again(values: Tensor, form: tuple[int, bool], chance: Tensor, block: int) -> Tensor:
    """Write ``values`` in blocks of that size and read them."""
    former, split_masters.BLOCK_ELEMENTS = split_masters.BLOCK_ELEMENTS, block
    try:
        codes = torch.empty(values.numel(), dtype=torch.uint8)
        tops = torch.empty(-(-values.numel() // block), dtype=torch.uint8)
        split_masters.to_codes(values, chance, form, codes, tops)
        return split_masters.from_codes(codes, tops, form)
    finally:
        split_masters.BLOCK_ELEMENTS = former


def direction(exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    return exp_avg / (exp_avg_sq.sqrt() + PlaneAdamW().eps)


def error(planes: StatePlanes, block: int, *, nearest: bool) -> float:
    first, second = planes.exp_avg, planes.exp_avg_sq
    assert first is not None
    assert second is not None
    chances = split_masters.halves(split_masters.chances(0, chance_key(0, 0, 1), planes.numel))
    if nearest:
        chances = tuple(torch.full_like(part, 0x8000) for part in chances)
    found = direction(
        again(first, split_masters.EXP_AVG_FORM, chances[0], block),
        again(second, split_masters.EXP_AVG_SQ_FORM, chances[1], block),
    )
    exact = direction(first, second)
    return float((found - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    planes = trained(args.steps, seed=0)
    rows: list[dict[str, Any]] = [
        {
            "block": block,
            "bytes_per_parameter": 2 + 2 / block,
            "error_by_chance": error(planes, block, nearest=False),
            "error_to_nearest": error(planes, block, nearest=True),
        }
        for block in SIZES
    ]
    common.print_table(
        ("block", "bytes of both moments", "error by chance", "error to nearest"),
        [
            (
                row["block"],
                f"{row['bytes_per_parameter']:.3f}",
                f"{row['error_by_chance']:.4f}",
                f"{row['error_to_nearest']:.4f}",
            )
            for row in rows
        ],
        title=f"A step's direction after {args.steps} steps of a small GPT, moments in 8 bits",
    )
    common.finish(
        {"bench": "state_blocks", "machine": common.machine(), "steps": args.steps, "blocks": rows},
        args.output,
    )


if __name__ == "__main__":
    main()
