"""What the documents that this project began with promise of large models, beside what ``outsize plan`` predicts.

VELOCITY's benchmark C, a step of 8B in fp32 on 128 tokens, layer by layer, and its 70B by its own formula and by a
plan; the PCIe guide's table of expected throughput, its model of 125M on its machines; RoundPipe's rows on eight
4090s, 235B at 31K tokens among them. Predictions, not measured: the simulator's, from data sheets. bench_velocity
measures benchmarks A and B, bench_bubble the idle shares.

    python bench/bench_documents.py                        # a minute of one core
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import finish, machine, print_table
from model_configs import MODELS

from outsize.cli.plan.plan_model import AskedModel
from outsize.cli.plan.plan_options import PlanFlags
from outsize.cli.plan.plan_question import ask_what_fits
from outsize.codecs.codec_spec import SPECS
from outsize.hardware.cards import parse_gpus
from outsize.hardware.machine_spec import Figure, Machine
from outsize.hardware.topology import SOUND_SHARE, theory_bytes_per_s
from outsize.planner.predict.prediction import Prediction, fastest

VELOCITY_PC = {"gpus": "4070ti", "ram": "128GB"}
# Seconds: a layer forward, a layer backward, a step, and 70B by T(8B) x 80/32 x 2.5, said to be 4 minutes.
CLAIMED_C = {"forward": 0.94, "backward": 1.95, "step": 101.0, "70B": 240.0}
# The guide's model, and what it expects, tokens/s.
NSA_125M = {**MODELS["Llama-3.1-8B"], "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
NSA_125M |= {"num_key_value_heads": 12, "intermediate_size": 3072, "vocab_size": 50304}
GUIDE = {
    (2, "PCIe Gen3"): "35-40",
    (2, "PCIe Gen4"): "45-55",
    (2, "NVLink"): "80-100",
    (4, "PCIe Gen3"): "30-35",
    (4, "NVLink"): "150-180",
}
GUIDE_STEPS = 50_000
# RoundPipe (arXiv 2604.27085) on eight 4090s, tokens/s, in fp16 with fp16 sums and weights of one step before.
_ADAPTERS = {"method": "lora", "lora_modules": "q_proj,k_proj,v_proj,o_proj"}
ROUNDPIPE: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "Qwen3-1.7B": (65_417, {"kernels": "fused", "tokens_per_step": 1_048_576}),
    "Llama-3.1-8B": (24_275, {"kernels": "fused", "tokens_per_step": 524_288}),
    "Qwen3-32B": (5_516, {"kernels": "fused", "optimizer_state": "int8", "tokens_per_step": 262_144}),
    "Qwen3-235B-A22B": (
        1_820,
        {**_ADAPTERS, "kernels": "fused", "seq_len": 31_744, "mlp_parts": 4},
    ),
}


def predicted(model: Mapping[str, Any], **asked: Any) -> Prediction:
    """Return what ``outsize plan`` says."""
    return fastest(ask_what_fits(PlanFlags(model="config", **asked), AskedModel("config", model)).question)


def layer_seconds(found: Prediction, backward: bool) -> float:
    """Return the median time from the start of a layer's compute to that of the next layer's, of a streamed step."""
    starts: dict[int, float] = {}
    for event in found.timeline.lane("compute:w0"):
        # Ops of one step, each unit once: F and its kin forwards, B and its kin backwards.
        if (
            event.row
            and str(event.op)[0] == ("B" if backward else "F")
            and not str(event.op).startswith("FREE")
        ):
            starts.setdefault(event.op.unit, event.start_s)
    return median(later - earlier for earlier, later in pairwise(sorted(starts.values())))


def velocity() -> dict[str, Any]:
    """Return benchmark C and the 70B projection: claimed, and predicted."""
    model = MODELS["Llama-3.1-8B"]
    one = {"seq_len": 128, "tokens_per_step": 128, "microbatches": 1}
    fp32 = predicted(model, **VELOCITY_PC, dtype="fp32", **one)
    bf16 = predicted(model, **VELOCITY_PC, **one)
    usual = predicted(model, **VELOCITY_PC)
    disk = {**VELOCITY_PC, "disk": "2TB", "commits": "none"}
    large = predicted(MODELS["Llama-3.1-70B"], **disk, **one)
    large_usual = predicted(MODELS["Llama-3.1-70B"], **disk)
    found = {
        "8B fp32, 128 tokens: a layer forward, s": (
            CLAIMED_C["forward"],
            layer_seconds(fp32, backward=False),
        ),
        "a layer backward, s": (CLAIMED_C["backward"], layer_seconds(fp32, backward=True)),
        "a step, optimizer and head included, s": (CLAIMED_C["step"], fp32.step_s),
        "the same in bf16, s": (None, bf16.step_s),
        "8B bf16, 131,072 tokens a step, tokens/s": (128 / CLAIMED_C["step"], usual.tokens_per_s),
        "70B by its formula from 101 s, s": (CLAIMED_C["70B"], CLAIMED_C["step"] * 80 / 32 * 2.5),
        "70B bf16, 128 tokens, from a 2 TB disk, s": (CLAIMED_C["70B"], large.step_s),
        "70B bf16, 131,072 tokens a step, tokens/s": (128 / CLAIMED_C["70B"], large_usual.tokens_per_s),
    }
    rows = [
        (what, "" if claim is None else f"{claim:,.2f}", f"{value:,.2f}")
        for what, (claim, value) in found.items()
    ]
    print_table(("VELOCITY, RTX 4070 Ti, 128 GB", "claimed", "predicted"), rows, title="C: the whole model")
    return {what: {"claimed": claim, "predicted": value} for what, (claim, value) in found.items()}


def effective() -> dict[str, float]:
    """Return what 512 GB/s come to: wire and logical GB/s of int4 on the link of that PC."""
    wire = SOUND_SHARE * theory_bytes_per_s(4, 16)
    bits = SPECS["int4"].max_bytes(2**20, "fp32") * 8 / 2**20
    found = {
        "wire": wire / 1e9,
        "bits": bits,
        "of fp32": wire * 32 / bits / 1e9,
        "of bf16": wire * 16 / bits / 1e9,
    }
    print_table(
        ("", ""),
        [(name, f"{value:,.1f}") for name, value in found.items()],
        title="Effective GB/s of int4, claimed 512",
    )
    return found


def with_link(name: str, generation: int) -> Machine:
    """Return a preset whose GPUs hang on PCIe of a generation, and copy to each other by way of it."""
    preset = parse_gpus(name)
    rate = Figure(value=SOUND_SHARE * theory_bytes_per_s(generation, 16), source=f"PCIe {generation} x16")
    links = tuple(replace(link, up_bytes_per_s=rate, down_bytes_per_s=rate) for link in preset.links)
    return replace(preset, links=links)


def guide() -> dict[str, Any]:
    """Return the guide's table, its model predicted on its machines."""
    rows, result = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for (count, link), claimed in GUIDE.items():
            preset = f"{count}xa100" if link == "NVLink" else f"{count}xa100-pcie"
            file = Path(folder) / "machine.json"
            there = parse_gpus(preset) if link == "NVLink" else with_link(preset, int(link[-1]))
            file.write_text(there.to_json())
            found = predicted(NSA_125M, machine=file, tokens_per_step=count * 65_536)
            hours = GUIDE_STEPS * 2048 / found.tokens_per_s / 3600
            rows.append((f"{count}xA100, {link}", claimed, f"{found.tokens_per_s:,.0f}", f"{hours:.1f}"))
            result[f"{count}xA100, {link}"] = {
                "claimed": claimed,
                "tokens_per_s": found.tokens_per_s,
                "hours": hours,
            }
    headings = (
        "125M",
        "claimed tokens/s",
        "predicted",
        f"hours of {GUIDE_STEPS:,} sequences",
    )
    print_table(headings, rows, title="The PCIe guide's expectations")
    return result


def roundpipe() -> dict[str, Any]:
    """Return published rows of eight 4090s and what exact steps are predicted to reach there."""
    rows, result = [], {}
    for name, (published, asked) in ROUNDPIPE.items():
        found = predicted(MODELS[name], gpus="8x4090", **asked)
        low, high = found.interval
        rows.append(
            (
                name,
                f"{published:,}",
                f"{found.tokens_per_s:,.0f}",
                f"{low:,.0f} to {high:,.0f}",
                f"{found.bubble:.1%}",
            )
        )
        result[name] = {"published": published, "tokens_per_s": found.tokens_per_s, "bubble": found.bubble}
    print_table(("8 x 4090", "published", "predicted", "interval", "bubble"), rows, title="RoundPipe")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    parts = {"velocity": velocity, "effective": effective, "guide": guide, "roundpipe": roundpipe}
    finish(
        {"benchmark": "documents", **{name: part() for name, part in parts.items()}, "machine": machine()},
        arguments.output,
    )


if __name__ == "__main__":
    main()
