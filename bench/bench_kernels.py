"""How much less does a block keep for its backward with Liger's kernels, and does `outsize plan` know? (counted)

The second block of a small model of each family runs forward on a CPU, as it is and with Liger's kernels in it. Triton
computes on accelerators alone, so the model's own operations run, and save what the kernels would have saved. Counted
are the bytes of all that autograd saves, each memory once, without weights and the block's input: what `outsize plan`
counts as kept, with `--kernels liger` and without. Nothing is timed, so the result is that of any machine.

    pip install liger-kernel triton
    python bench/bench_kernels.py --output bench/results/kernels_2026-11.json
"""

import argparse
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from outsize.accelerators import Devices
from outsize.model.liger import take_liger

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 256,
}
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "phi3", "granite", "olmo2")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BLOCK = 1


def kept_bytes(model: nn.Module, ids: Tensor) -> int:
    """Return what the model's second block keeps of a microbatch of ``ids``, [B, S]."""
    block: Any = model.get_submodule(f"model.layers.{BLOCK}")
    saved: dict[int, int] = {}
    apart = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    shared: set[int] = set()
    held: list[Tensor] = []  # so that no memory is used twice

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return held[-1]

    def is_entered(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values(), *kwargs.get("position_embeddings", ())]
        shared.update(each.untyped_storage().data_ptr() for each in given if isinstance(each, torch.Tensor))
        watch.__enter__()

    watch = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    hooks = [
        block.register_forward_pre_hook(is_entered, with_kwargs=True),
        block.register_forward_hook(lambda *_: watch.__exit__(None, None, None)),
    ]
    model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return sum(num_bytes for place, num_bytes in saved.items() if place not in apart | shared)


def planned_bytes(config: dict[str, Any], dtype: str, sequences: int, seq_len: int, *, fused: bool) -> int:
    """Return what `outsize plan` counts for that block."""
    counts = common.counted(config, dtype, kernels="liger" if fused else "none")
    return counts.workload(sequences, seq_len).saved_bytes[BLOCK + 1]


def case(family: str, dtype: str, args: argparse.Namespace) -> dict[str, Any]:
    """Count one family in one dtype."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, DTYPES[dtype])).train()
    ids = torch.randint(SIZES["vocab_size"], (args.sequences, args.seq_len))
    found: dict[str, Any] = {"family": family, "dtype": dtype, "as_it_is": kept_bytes(model, ids)}
    found["kernels"] = take_liger(model, Devices.parse("cuda"))
    found["liger"] = kept_bytes(model, ids)
    for name, fused in (("as_it_is", False), ("liger", True)):
        counted = planned_bytes(config.to_dict(), dtype, args.sequences, args.seq_len, fused=fused)
        found[f"planned_{name}"] = counted
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    cases = [case(family, dtype, args) for family in args.families for dtype in DTYPES]
    tokens = args.sequences * args.seq_len
    for found in cases:
        found["less"] = 1 - found["liger"] / found["as_it_is"]
        plan, plain = found["planned_liger"], found["planned_as_it_is"]
        found["planned_less"] = None if plan is None else 1 - plan / plain
    common.print_table(
        ("block", "kept, bytes a token", "with Liger", "less", "planned"),
        [
            (
                f"{found['family']}, {found['dtype']}",
                found["as_it_is"] // tokens,
                found["liger"] // tokens,
                f"{found['less']:.0%}",
                None if found["planned_less"] is None else f"{found['planned_less']:.0%}",
            )
            for found in cases
        ],
        title=f"What a block of width {SIZES['hidden_size']} keeps of {tokens} tokens",
    )
    packages = {name: common.version_of(name) for name in ("liger-kernel", "triton")}
    result = {"bench": "kernels", "machine": common.machine(), "packages": packages, "sizes": SIZES}
    common.finish(result | {"tokens": tokens, "cases": cases}, args.output)


if __name__ == "__main__":
    main()
