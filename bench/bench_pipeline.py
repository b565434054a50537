"""How fast does a pipeline of diffusers denoise whose transformer does not fit, against diffusers' group offload?

The same Flux pipeline, texts and noise, in fp32, every variant in a process of its own, in turn; latents are compared.
``resident`` holds all. diffusers' own group offload has a block a group: from host memory, which is no work where the
device is the CPU, and with ``offload_to_disk_path``, through the page cache. ``outsize`` has a budget of memory, and
its home in host memory or on disk, from which it reads with direct I/O. Memory is what is resident at most while steps
are made, beyond what it was before the model was loaded: pages of files that are mapped are in it.

    python bench/bench_pipeline.py                   # 159M parameters, 256 x 256 pixels: 4 minutes on two cores
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

VARIANTS = ("resident", "group offload", "group offload, disk", "outsize", "outsize, disk")
TEXT, POOLED, TOKENS = 512, 256, 64


def build(args: argparse.Namespace) -> None:
    """Save a transformer of Flux's shape, at random weights."""
    import torch
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=args.layers, num_single_layers=2 * args.layers,
        attention_head_dim=64, num_attention_heads=args.width // 64, joint_attention_dim=TEXT,
        pooled_projection_dim=POOLED, axes_dims_rope=(16, 24, 24),
    ).save_pretrained(args.dir / "model")  # fmt: skip


def place(model: Any, args: argparse.Namespace) -> None:
    """Have ``model`` lie as a variant says."""
    import torch

    if args.child.startswith("outsize"):
        import outsize

        home = "disk" if args.child.endswith("disk") else "host"
        outsize.wrap(
            model,
            device="cpu",
            device_memory=args.budget,
            home=home,
            store_dir=args.dir / "home",
            microbatches=1,
        )
    elif args.child.startswith("group"):
        folder = {"offload_to_disk_path": str(args.dir / "groups")} if args.child.endswith("disk") else {}
        cpu = torch.device("cpu")
        model.enable_group_offload(cpu, cpu, "block_level", num_blocks_per_group=1, **folder)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Make latents, and return when steps ended, what was resident, and the latents."""
    import torch
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    import outsize  # noqa: F401 - imported in each, so that none of it counts

    before = common.rss_bytes()
    model = FluxTransformer2DModel.from_pretrained(args.dir / "model").eval().requires_grad_(False)
    place(model, args)
    absent = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), transformer=model, **dict.fromkeys(absent)
    )
    pipeline.set_progress_bar_config(disable=True)
    random, at, peaks = torch.Generator().manual_seed(1), [], []

    def ended(_: Any, step: int, time_: Any, values: dict[str, Any]) -> dict[str, Any]:
        at.append(time.perf_counter())
        peaks.append(common.peak_rss_bytes() - before)
        common.reset_peak_rss()
        return values

    latents = pipeline(
        prompt_embeds=torch.randn(1, TOKENS, TEXT, generator=random),
        pooled_prompt_embeds=torch.randn(1, POOLED, generator=random),
        height=args.size, width=args.size, num_inference_steps=args.steps + 1, output_type="latent",
        generator=random, callback_on_step_end=ended,
    ).images  # fmt: skip
    seconds = [end - begin for begin, end in pairwise(at)]  # the first step is not timed
    return {
        "seconds": seconds, "peak_bytes": max(peaks[1:]), "threads": torch.get_num_threads(),
        "weight_bytes": sum(4 * parameter.numel() for parameter in model.parameters()),
        "latents": latents.flatten().tolist(),
    }  # fmt: skip


def main() -> None:
    """Run each variant in turn, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4, help="double blocks; twice as many single ones")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--size", type=int, default=256, help="pixels of a side")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--budget", default="192MiB", help="device memory of outsize")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.child:
        print(json.dumps(build(args) if args.child == "build" else run(args)))
        return
    runs: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as directory:
        args.dir = Path(directory)
        build(args)
        for _ in range(args.rounds):
            for variant in VARIANTS:
                runs[variant].append(common.run_child(variant, args.dir))
    want = runs["resident"][0]["latents"]
    scale = max(map(abs, want))
    rows = [
        {
            "variant": variant,
            "steps_per_s": 1 / common.Spread.of(s for one in results for s in one["seconds"]).median,
            "peak_bytes": max(one["peak_bytes"] for one in results),
            "off": max(abs(a - b) for one in results for a, b in zip(one["latents"], want, strict=True))
            / scale,
        }
        for variant, results in runs.items()
    ]
    table = [[row["variant"], row["steps_per_s"], row["peak_bytes"] / 2**20, row["off"]] for row in rows]
    common.print_table(("variant", "steps/s", "peak MiB", "off"), table, "Latents of a Flux pipeline")
    facts = {name: runs["resident"][0][name] for name in ("weight_bytes", "threads")}
    asked = {"budget": args.budget, "size": args.size, "steps": args.steps, "rounds": args.rounds}
    common.finish({"rows": rows, **facts, **asked, "machine": common.machine()}, args.output)


if __name__ == "__main__":
    main()
