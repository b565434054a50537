"""What becomes of the promises of compressed tiers when they are measured?

A concept paper for a compressed tier in host memory (ZRAMPipeline) promises, for models of 70B parameters: zstd at
level 3 makes 3:1 to 4:1 of fp16 weights at less than 5 % of the processor; a forward takes less than 10 ms longer; 35
to 45 GB of GPU memory and 25 to 35 GB of RAM are enough; 24 GB of GPU memory hold 50B to 70B. Beside each stands what
this package does, measured here (ratios, rates of one core, steps of a small model) or planned (what needs a GPU).

    OMP_NUM_THREADS=1 python bench/bench_packed_claims.py [--tensors FILE] [--steps N] [--output FILE]
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import bench_codec
import bench_speed
import bench_transport
import common
import quality
import torch
from safetensors.torch import load_file
from torch import Tensor

from outsize.cli.plan.plan_compare import largest_models
from outsize.cli.plan.plan_options import PlanFlags
from outsize.cli.plan.plan_question import Asked, ask
from outsize.codecs.codec import measure
from outsize.codecs.transport import Transport
from outsize.planner.predict.decision_search import planned_at
from outsize.planner.predict.question import fits_at_all
from outsize.planner.search.step_plan import Budgets
from outsize.units import format_bytes, format_count

# PCIe 4.0 x16, as it is measured rather than printed on the box.
LINK_BYTES_PER_S = 25e9
PACKED = "lossless3"
# No link at all: what is left is the codec.
FAST_GB_PER_S = 1000.0
RAM = "128GiB"
GIB = 2**30
# Moments are those of training by then, and the ratio no longer moves.
STATE_STEPS = 200
LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Claim:
    what: str
    claimed: str
    measured: str
    how: str


def weights(tensors: Path | None) -> Tensor:
    """Of a sentence encoder where it is installed, else normal ones; fp32 [n]."""
    if tensors is None:
        return bench_codec.normal(torch.float32)
    found = [t.flatten().float() for t in load_file(tensors).values() if t.is_floating_point()]
    return torch.cat(found)[: bench_codec.NUMEL]


def compression(source: Tensor, title: str) -> list[Claim]:
    claims = []
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        cast = source.to(dtype)
        zstd = bench_codec.rivals(cast)["zstd-3"]
        (packed,) = measure("weights", cast, [PACKED])
        cores = LINK_BYTES_PER_S / zstd["decode_bytes_per_s"]
        claims += [
            Claim(
                f"ratio, {name}",
                "3:1 to 4:1",
                f"zstd-3 {1 / zstd['ratio']:.2f}:1, {PACKED} {1 / packed.ratio:.2f}:1",
                f"{title}; no lossless code of single exponents comes above {1 / packed.bound:.2f}:1",
            ),
            Claim(
                f"processor, {name}",
                "below 5 %",
                f"zstd-3 {cores:.0f} cores, {PACKED} none on the host",
                f"to keep a link of {LINK_BYTES_PER_S / 1e9:.0f} GB/s fed: zstd unpacks "
                f"{zstd['decode_bytes_per_s'] / 1e9:.2f} GB/s on a core; {PACKED} crosses as it is and is decoded on "
                f"the device (on a core here, at {packed.decode_bytes_per_s / 1e9:.1f} GB/s)",
            ),
        ]
    return claims


def state(steps: int) -> list[Claim]:
    """Weights, split masters and fp32 moments that lie at rest after ``steps`` steps of AdamW, 12 bytes a parameter."""
    claims, bytes_left = [], 0.0
    for name, plane in trained_planes(steps).items():
        codecs = {key: value for key, value in bench_codec.rivals(plane).items() if key != "copy"}
        if plane.is_floating_point():
            codecs |= {each.codec: asdict(each) for each in measure("weights", plane, [PACKED])}
        best = min(1.0, *(codec["ratio"] for codec in codecs.values()))
        bytes_left += best * plane.element_size()
        told = (
            f"{codec} leaves {found['ratio']:.3f} at {GIB / found['encode_bytes_per_s']:.2f} + "
            f"{GIB / found['decode_bytes_per_s']:.2f} s of a core to write and read a GiB"
            for codec, found in codecs.items()
        )
        claims.append(Claim(f"at rest: {name}", "3:1 to 4:1", f"{1 / best:.2f}:1", "; ".join(told)))
    claims.append(
        Claim("at rest, all of it", "3:1 to 4:1", f"{12 / bytes_left:.2f}:1", "12 bytes a parameter")
    )
    return claims


def trained_planes(steps: int) -> dict[str, Tensor]:
    """The planes of the blocks' matrices of a GPT that has learnt source code for ``steps`` steps, each [n]."""
    model = quality.fresh_model(0, n_embd=256, n_layer=4)
    tokens = torch.frombuffer(quality.text(), dtype=torch.uint8).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - quality.SEQ_LEN, (quality.SEQUENCES,))
        batch = torch.stack([tokens[start : start + quality.SEQ_LEN] for start in starts])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    blocks = [p for name, p in model.named_parameters() if ".h." in name and p.dim() == 2]
    masters = torch.cat([p.detach().flatten() for p in blocks]).view(torch.int32)
    moments = {
        words: torch.cat([optimizer.state[p][key].flatten() for p in blocks])
        for words, key in (("first moments, fp32", "exp_avg"), ("second moments, fp32", "exp_avg_sq"))
    }
    weights = (masters >> 16).to(torch.int16).view(torch.bfloat16)
    return {"weights, bf16": weights, "lower halves of masters": masters.to(torch.int16), **moments}


def overhead(steps: int) -> tuple[list[Claim], dict[str, Any]]:
    """Steps of a small frozen model, raw and packed, over no link and over one that is waited for."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        bench_speed.build(
            directory,
            bench_transport.LAYERS,
            bench_transport.HIDDEN,
            bench_transport.VOCABULARY,
            50_000,
        )
        for link, rate in (("fast link", FAST_GB_PER_S), ("slow link", 0.02)):
            for codec in ("raw", PACKED):
                case = bench_transport.Case(
                    link,
                    rate,
                    bench_transport.FROZEN,
                    {"weights": codec} if codec != "raw" else {},
                )
                prepared = bench_transport.prepared_for(case, directory, steps)
                before = common.Usage.now()
                seconds, losses, wire, logical = bench_transport.run(prepared, directory, steps)
                found[f"{link}, {codec}"] = {
                    "step_s": statistics.median(seconds),
                    "losses": losses,
                    "up_bytes": wire["up:w0"],
                    "up_logical_bytes": logical["up:w0"],
                    "cpu_s": (common.Usage.now() - before).cpu_s,
                    "host_bytes": prepared.plan.total_bytes("host"),
                }
    fast, packed = found["fast link, raw"], found[f"fast link, {PACKED}"]
    slow, faster = found["slow link, raw"], found[f"slow link, {PACKED}"]
    added = packed["step_s"] - fast["step_s"]
    equal = fast["losses"] == packed["losses"] == slow["losses"] == faster["losses"]
    layer_bytes = 2 * (8192 * 8192 * 2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    claims = [
        Claim(
            "overhead of a step",
            "below 10 ms, forward",
            f"{1e3 * added:+.0f} ms of {1e3 * fast['step_s']:.0f} ms",
            "a 30M model, forward and backward over no link, decoded on a core; a layer of 70B has "
            f"{layer_bytes / 1e9:.1f} GB",
        ),
        Claim(
            "step over a link that it waits for",
            "faster than raw",
            f"{slow['step_s'] / faster['step_s']:.2f} times as fast",
            "the same model over 0.02 GB/s; losses " + ("equal bit for bit" if equal else "DIFFER"),
        ),
    ]
    return claims, found


def asked(directory: Path, host_memory: str | None = None) -> Asked:
    """LoRA on a 70B model: weights do not train, so they can be packed."""
    path = directory / "config.json"
    path.write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    return ask(
        PlanFlags(
            model=str(path),
            gpus="4090",
            method="lora",
            seq_len=2048,
            tokens_per_step=8 * 2048,
            microbatches=8,
            home="host",
            host_memory=host_memory,
        )
    )


def memory() -> tuple[list[Claim], dict[str, Any]]:
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for codec in ("raw", PACKED):
            base = asked(Path(name), RAM)
            question = base.question.deciding(transport=Transport(weights=codec))
            least = smallest_device(question)
            free = replace(question, budgets=Budgets(device=least))
            table = planned_at(free, 8, "host").plan.memory
            largest = largest_models(replace(base, question=question))
            found[codec] = {
                "device_bytes": least,
                "host_bytes": sum(table["host"].values()),
                "largest_parameters": max((each.num_parameters for each in largest), default=0),
            }
    raw, packed = found["raw"], found[PACKED]

    def sizes(key: str) -> str:
        return f"{format_bytes(raw[key])} raw, {format_bytes(packed[key])} packed"

    claims = [
        Claim(
            "GPU memory for 70B",
            "35 to 45 GB",
            sizes("device_bytes"),
            "planned: the least that LoRA of rank 8 at 2,048 tokens fits; the tier does not change it",
        ),
        Claim("RAM for 70B", "25 to 35 GB", sizes("host_bytes"), "planned: bf16 weights, adapters, buffers"),
        Claim(
            "largest model on 24 GB of GPU memory",
            "50B to 70B",
            f"{format_count(raw['largest_parameters'])} raw, {format_count(packed['largest_parameters'])} packed",
            f"planned: LoRA with {RAM} of RAM, which is what ends it",
        ),
    ]
    return claims, found


def smallest_device(question: Any) -> int:
    """The least GPU memory that a plan fits, to 1 %, with RAM as it takes."""
    low, high = 2**28, 2**40
    while high > low * 1.01:
        middle = int((low * high) ** 0.5)
        fits = fits_at_all(replace(question, budgets=Budgets(device=middle), microbatches=8, home="host"))
        low, high = (low, middle) if fits else (middle, high)
    return high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=Path, default=bench_codec.encoder())
    parser.add_argument("--steps", type=common.steps_above(bench_transport.NUM_UNTIMED), default=6)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    title = arguments.tensors.name if arguments.tensors else "normal weights"
    claims = compression(weights(arguments.tensors), title)
    claims += state(STATE_STEPS)
    more, steps = overhead(arguments.steps)
    planned, sizes = memory()
    claims += [*more, *planned]
    common.print_table(("what", "claimed", "found"), [(c.what, c.claimed, c.measured) for c in claims])
    for claim in claims:
        print(f"{claim.what}: {claim.how}")
    common.finish(
        {
            "bench": "packed_claims",
            "machine": common.machine(),
            "claims": [vars(claim) for claim in claims],
            "steps": steps,
            "planned": sizes,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
