"""What do products in 8 bits do to a run? Loss curves of the 34M Llama on real text, beside products of bf16.

The model of `shapes`, fresh from each seed, learns the source of Python's standard library, byte by byte, wrapped and
stepped by AdamW, in bf16 beside exact fp32 masters; on a CPU products in 8 bits are emulated (`model.products`). How
much of a difference is chance shows a run whose first weights differ in their last bits. Target, over three seeds:
within 0.5 % after 1,000 steps, at the end of which the learning rate is zero. On two quiet cores a step in fp8 takes
a second, one in bf16 a quarter of one.

    python bench/bench_products_quality.py --output bench/results/products_quality.json
"""

from argparse import Namespace
from collections.abc import Iterator

import quality
import torch
from shapes import COMMON, SHAPES
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import outsize

LR, WARMUP = 1e-3, 20
NATIVE, CONTROL = "native", "native, first weights nudged"
# Half of the last bit of a bf16 weight: some change.
NUDGE = 2.0**-9
VARIANTS = {NATIVE: "native", CONTROL: "native", "fp8": "fp8", "fp8-rowwise": "fp8-rowwise"}


def losses(seed: int, steps: int, variant: str, corpus: Tensor, args: Namespace) -> list[float]:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**COMMON, **SHAPES[args.shape]})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if variant == CONTROL:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + NUDGE * torch.randn(parameter.shape))
    room = {"device_memory": "4GiB", "host_memory": "4GiB", "device": args.device}
    outsize.wrap(model, products=VARIANTS[variant], **room)
    optimizer = outsize.AdamW(model, lr=LR, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for step in range(1, steps + 1):
        places = torch.randint(len(corpus) - args.seq_len, (args.sequences,), generator=generator)
        batch = torch.stack([corpus[place : place + args.seq_len] for place in places.tolist()])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        found.append(loss.item())
        optimizer.param_groups[0]["lr"] = LR * min(1.0, step / WARMUP) * (1.0 - (step - 1) / steps)
        optimizer.step()
        optimizer.zero_grad()
    outsize.unwrap(model)
    return found


def main() -> None:
    parser = quality.arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="llama-34m")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--products", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    args = parser.parse_args()
    corpus = torch.frombuffer(quality.text(), dtype=torch.uint8).long()

    def runs(seed: int) -> Iterator[tuple[str, list[float]]]:
        for variant in dict.fromkeys((NATIVE, *args.products)):
            yield variant, losses(seed, args.steps, variant, corpus, args)

    quality.compare("products", NATIVE, runs, args)


if __name__ == "__main__":
    main()
