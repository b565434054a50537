"""VELOCITY's benchmarks A and B, with real tokens: can a ring saturate, and what does one decoder layer train at?

A: tokens from a file of token ids through the engine's loader (read, widen, hand over; buffers that rotate) to a
consumer that does nothing. First it asks as fast as it can: that is the most. Then it asks at a fixed rate, and the
share of the time that it waits for a batch is its idle share. Wire bytes are those read, logical bytes those handed
over (ids and labels, int64).

B: forward with checkpointing, backward and the engine's AdamW of one decoder layer of Llama-3-8B's shape, on batches
from that ring through a small embedding. MFU is 6 x parameters x tokens per second (without the recompute) over the
matrix product that the probe measures in the same run.

    python bench/bench_velocity.py                                   # about 2 minutes on two cores
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from common import Spread, finish, machine, print_table
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from outsize.accelerators import Devices
from outsize.config import DataConfig
from outsize.data import ModelLimits, PackedDataset, Prefetcher, open_data
from outsize.model.sizes.model_spec import pack_unit
from outsize.optim.adamw import PlaneAdamW
from outsize.optim.planes import StatePlanes
from outsize.optim.step import step_state
from outsize.probing.compute import measure_matmul
from outsize.probing.effort import FULL
from outsize.storage.ledger import Arena

VOCABULARY = 128_256
READ_BYTES, HANDED_BYTES = 4, 16
CLAIM_A = (
    "A: 37,498,585 tokens/s",
    "float32 numbers of dummy matrices: 150 MB/s; a token here is one id of a text, read from a file",
)
CLAIM_B = (
    "B: 7,100 tokens/s in one Llama-3-8B layer on an RTX 4070 Ti, 'the GPU remained fully utilized'",
    "9.3 TFLOP/s at 6 x 218M operations per token: 23 % of the 40.1 TFLOP/s (fp32) of that card",
)

# What `outsize train` holds ready.
DEPTH = DataConfig.model_fields["prefetch"].default


def saturated(dataset: PackedDataset, num_sequences: int, seconds: float) -> float:
    """Return tokens per second to a consumer that asks as fast as it can."""
    with Prefetcher(dataset, num_sequences, depth=DEPTH) as ring:
        for _ in range(DEPTH):
            ring.next()
        num_batches, started = 0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            ring.next()
            num_batches += 1
        return num_batches * num_sequences * dataset.seq_len / (time.perf_counter() - started)


def paced(dataset: PackedDataset, num_sequences: int, rate: float, seconds: float) -> tuple[float, float]:
    """Return tokens per second and idle share of a consumer that takes ``rate`` tokens per second where it can.

    Time that it is late is made up for, as a device with a queue would; it waits asleep for its next turn.
    """
    period_s, never = num_sequences * dataset.seq_len / rate, threading.Event()
    with Prefetcher(dataset, num_sequences, depth=DEPTH) as ring:
        for _ in range(DEPTH):
            ring.next()
        num_batches, idle_s, started = 0, 0.0, time.perf_counter()
        while (now := time.perf_counter()) - started < seconds:
            never.wait(max(0.0, started + num_batches * period_s - now))
            asked = time.perf_counter()
            ring.next()
            idle_s += time.perf_counter() - asked
            num_batches += 1
        elapsed = time.perf_counter() - started
    return num_batches * num_sequences * dataset.seq_len / elapsed, idle_s / elapsed


def bench_a(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    path = directory / "tokens.npy"
    ids = np.random.default_rng(0).integers(0, VOCABULARY, arguments.num_tokens, dtype=np.int32)
    np.save(path, ids)
    rows, result = [], {}
    for seq_len in arguments.seq_lens:
        with open_data(
            path, None, seq_len=seq_len, cache_dir=directory, limits=ModelLimits(vocab_size=VOCABULARY)
        ) as dataset:
            num_sequences = max(1, arguments.batch_tokens // seq_len)
            most = Spread.of(
                saturated(dataset, num_sequences, arguments.seconds) for _ in range(arguments.rounds)
            )
            taken = [
                paced(dataset, num_sequences, arguments.rate, arguments.seconds)
                for _ in range(arguments.rounds)
            ]
        rate, idle = Spread.of(rate for rate, _ in taken), Spread.of(share for _, share in taken)
        rows.append(
            [
                str(seq_len),
                f"{most.median / 1e6:.0f}",
                f"{most.median * READ_BYTES / 1e9:.2f}",
                f"{most.median * HANDED_BYTES / 1e9:.2f}",
                f"{rate.median / 1e6:.0f}",
                f"{idle.median:.1%}",
                f"{1 - idle.median:.1%}",
            ]
        )
        result[str(seq_len)] = {
            "saturated_tokens_per_s": most.median,
            "saturated_low": most.low,
            "wire_bytes_per_s": most.median * READ_BYTES,
            "logical_bytes_per_s": most.median * HANDED_BYTES,
            "paced_tokens_per_s": rate.median,
            "idle_share": idle.median,
            "idle_share_high": idle.high,
            "supplied_share": 1 - idle.median,
        }
    headers = ["sequence", "most, M tokens/s", "wire GB/s", "logical GB/s", "asked, M/s", "idle", "supplied"]
    print_table(
        headers, rows, title=f"A: ring of pre-tokenised ids, asked for {arguments.rate / 1e6:.0f} M tokens/s"
    )
    print(f"\nVELOCITY claims {CLAIM_A[0]}; it counted {CLAIM_A[1]}")
    return result


def bench_b(arguments: argparse.Namespace, directory: Path) -> dict[str, object]:
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    config = LlamaConfig(  # Llama-3-8B, one layer
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 7 // 2,
        num_attention_heads=arguments.hidden // 128,
        num_key_value_heads=max(1, arguments.hidden // 512),
        max_position_embeddings=8192,
        rope_theta=500_000.0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    layer = LlamaDecoderLayer(config, 0).to(device, dtype)
    rotary = LlamaRotaryEmbedding(config).to(device)
    embedding = torch.randn(1024, arguments.hidden, dtype=dtype, device=device)
    shapes = [(name, tuple(p.shape), True, p.ndim > 1) for name, p in layer.named_parameters()]
    unit = pack_unit(0, "layer", "block", shapes)
    num_parameters = sum(p.numel() for p in layer.parameters())
    tokens, path = arguments.layer_tokens, directory / "tokens.npy"
    positions = torch.arange(tokens, device=device)[None]
    with (
        Arena() as arena,
        open_data(
            path, None, seq_len=tokens, cache_dir=directory, limits=ModelLimits(vocab_size=VOCABULARY)
        ) as dataset,
        Prefetcher(dataset, 1) as ring,
    ):
        planes = [arena.take(4 * unit.numel, "plane").view(torch.float32) for _ in range(4)]
        times: dict[str, list[float]] = {"layer": [], "optimizer": [], "wait": []}
        for index in range(arguments.layer_steps + 1):
            started = time.perf_counter()
            batch = ring.next()
            waited = time.perf_counter()
            hidden = embedding[batch.input_ids.to(device) % len(embedding)].requires_grad_()
            out = checkpoint(
                layer, hidden, position_embeddings=rotary(hidden, positions), use_reentrant=False
            )
            (out[0] if isinstance(out, tuple) else out).float().square().mean().backward()
            if device != "cpu":
                torch.cuda.synchronize()
            computed = time.perf_counter()
            for tensor in unit.tensors:
                gradient = layer.get_parameter(tensor.name).grad
                assert gradient is not None
                planes[3][tensor.offset : tensor.offset + tensor.numel].copy_(gradient.flatten())
                gradient.zero_()
            state = StatePlanes(weights=planes[0], exp_avg=planes[1], exp_avg_sq=planes[2])
            step_state(PlaneAdamW(), unit, state, planes[3], start=0, step=index + 1, lr=1e-5)
            if index > 0:
                times["wait"].append(waited - started)
                times["layer"].append(computed - waited)
                times["optimizer"].append(time.perf_counter() - computed)
        median = {name: Spread.of(values).median for name, values in times.items()}
        layer_range = Spread.of(times["layer"])
    product = measure_matmul(Devices.parse(device), "bf16" if device != "cpu" else "fp32", FULL)
    assert product.median is not None, product.source
    rate = tokens / median["layer"]
    mfu = 6 * num_parameters * rate / product.median
    rows = [
        ["tokens per step", str(tokens)],
        ["parameters, M", f"{num_parameters / 1e6:.1f}"],
        ["layer, tokens/s", f"{rate:.1f}"],
        ["with the optimizer, tokens/s", f"{tokens / sum(median.values()):.1f}"],
        ["waited for the ring", f"{median['wait'] / sum(median.values()):.2%}"],
        ["product, GFLOP/s", f"{product.median / 1e9:.0f}"],
        ["MFU of the layer, without recompute", f"{mfu:.1%}"],
        ["with the recompute counted", f"{mfu * 8 / 6:.1%}"],
    ]
    print_table(["one decoder layer", device], rows, title="B: forward, backward with checkpointing")
    print(f"\nVELOCITY claims {CLAIM_B[0]}; that is {CLAIM_B[1]}")
    return {
        "device": device,
        "num_parameters": num_parameters,
        "tokens": tokens,
        "tokens_per_s": rate,
        "layer_spread": layer_range.relative,
        "tokens_per_s_with_optimizer": tokens / sum(median.values()),
        "ring_wait_share": median["wait"] / sum(median.values()),
        "product_flops_per_s": product.median,
        "mfu": mfu,
        "hfu": mfu * 8 / 6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--num-tokens", type=int, default=64 * 2**20)
    parser.add_argument("--seq-lens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--batch-tokens", type=int, default=2**18)
    parser.add_argument("--rate", type=float, default=200e6, help="tokens/s that the consumer of A asks for")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layer-tokens", type=int, default=256)
    parser.add_argument("--layer-steps", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-velocity-", dir=arguments.dir) as scratch:
        ring = bench_a(arguments, Path(scratch))
        layer = bench_b(arguments, Path(scratch))
    finish(
        {
            "benchmark": "velocity",
            "machine": machine(),
            "rate_asked": arguments.rate,
            "ring": ring,
            "layer": layer,
            "claims": {"a": CLAIM_A, "b": CLAIM_B},
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
