"""Recorded runs without training: a directory as a run leaves it, of as many steps as asked for, the same every
time."""

import json
import math
from pathlib import Path

from outsize.planner.program.program import op_or_text
from outsize.planner.simulate.simulator import Event, Timeline
from outsize.reporting.html_page import to_chrome

MIB = 2**20
UNITS = ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(8)), "lm_head"]


def line(step: int, **changes) -> dict:
    """A line of a run that waits for the link for a third of its time; ``changes`` are laid over it."""
    wobble = math.sin(step * 12.9898) * 0.5 + math.sin(step * 78.233) * 0.5
    seconds = changes.pop("seconds", 1.2 + 0.04 * wobble + (2.5 if step % 1000 == 7 else 0.0))
    waits = changes.pop(
        "waits", {"weights": {"up:w0": 0.28}, "optimizer": {"host": 0.06}, "python": {"none": 0.02}}
    )
    waits = {c: {o: share * seconds for o, share in owners.items()} for c, owners in waits.items()}
    idle = sum(sum(owners.values()) for owners in waits.values())
    return {
        "schema": 4,
        "time": 1.78e9 + 1.2 * step,
        "step": step,
        "loss": 2.1 + 7.5 * math.exp(-step / 900) + 0.12 * wobble,
        "lr": 2e-5 * min(1, step / 100) * (0.5 + 0.5 * math.cos(step / 17000)),
        "grad_norm": 0.8 + 0.3 * abs(wobble) + (14.0 if step % 9000 == 4321 else 0.0),
        "tokens": 16384,
        "seconds": seconds,
        "tokens_per_s": 16384 / seconds,
        "mfu": 0.31,
        "bytes_up": 20 * 10**9,
        "bytes_down": 9 * 10**9,
        "bytes_read": 0,
        "bytes_written": 0,
        "wire_bytes": {"up:w0": 20 * 10**9, "down:w0": 9 * 10**9, "disk:read": 0, "disk:write": 0},
        "logical_bytes": {"up:w0": 20 * 10**9, "down:w0": 9 * 10**9, "disk:read": 0, "disk:write": 0},
        "stall_share": 0.3,
        "stall_owner": "up:w0",
        "skipped": False,
        "skipped_steps": step // 20000,
        "busy_s": {
            "compute:w0": seconds - idle,
            "up:w0": 0.8 * seconds,
            "down:w0": 0.4 * seconds,
            "host": 0.5 * seconds,
        },
        "stall_s": {"up:w0": 0.3 * seconds},
        "idle_s": {"compute:w0": idle},
        "waits_s": {"compute:w0": waits},
        "forward_s": 0.2 * seconds,
        "backward_s": 0.4 * seconds,
        "update_s": 0.5 * seconds,
        "data_s": 0.0,
        "between_s": 0.0,
        "cpu_s": seconds,
        "num_compute_ops": 64,
        "tiers": {
            "device": {
                "used_bytes": 18000 * MIB,
                "high_water_bytes": 19500 * MIB,
                "budget_bytes": 20480 * MIB,
            },
            "host": {"used_bytes": 61000 * MIB, "high_water_bytes": 61000 * MIB, "budget_bytes": 98304 * MIB},
        },
        "rss_bytes": 62000 * MIB + int(40 * MIB * wobble),
        "peak_rss_bytes": 62100 * MIB,
        "device_bytes": {"cuda:0": 19000 * MIB},
        "gpus": [
            {
                "index": 0,
                "sm_clock_hz": 1755000000,
                "utilisation_share": 0.87,
                "memory_used_bytes": 19400 * MIB,
                "power_w": 351.5,
                "temperature_c": 64,
                "pcie_sent_bytes": 9 * 10**9,
                "pcie_received_bytes": 20 * 10**9,
                "clock_limits": "power cap",
            }
        ],
        "fallbacks": {},
        **changes,
    }


def timeline(microbatches: int = 4) -> Timeline:
    """A step of `UNITS`: loads that compute waits for, gradients that leave, an optimizer behind them."""
    events, up, down, host, compute = [], 0.0, 0.0, 0.0, 0.0

    def add(
        lane: str, op: str, start: float, length: float, ready: float = 0.0, waited_for: str = ""
    ) -> float:
        waited = max(0.0, ready - start)
        start = max(start, ready)
        events.append(
            Event(
                lane=lane,
                op=op_or_text(op),
                start_s=start,
                end_s=start + length,
                waited_s=waited,
                waited_for=op_or_text(waited_for) if waited else None,
            )
        )
        return start + length

    last = len(UNITS) - 1
    for kind, order in (("F", range(last)), ("B", range(last, -1, -1))):
        for unit in order:
            up = add("up:w0", f"LOAD {unit}@w0.{unit % 3}", up, 0.030)
            for microbatch in range(microbatches):
                name = "FB" if unit == last else kind
                length = 0.004 if name == "F" else 0.013
                waited = f"LOAD {unit}@w0.{unit % 3}"
                compute = add("compute:w0", f"{name} {unit}.{microbatch}@w0", compute, length, up, waited)
            if kind == "B":
                down = add(
                    "down:w0", f"GRAD {unit}@w0", down, 0.022, compute, f"{kind} {unit}.{microbatches - 1}@w0"
                )
                host = add("host", f"STEP {unit}", host, 0.018, down, f"GRAD {unit}@w0")
    return Timeline(tuple(events))


def make_run(directory: Path, steps: int = 10, **changes) -> Path:
    """Write a whole run directory; ``changes`` are those of every line."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "heartbeat.jsonl").open("w") as file:
        file.writelines(json.dumps(line(step, **changes)) + "\n" for step in range(1, steps + 1))
    classes = {
        "slots": 9000 * MIB,
        "accumulators": 6000 * MIB,
        "activations": 2500 * MIB,
        "workspace": 1500 * MIB,
    }
    told = {
        "below": "host",
        "memory_bytes": {"device": classes, "host": {"home": 56000 * MIB, "buffers": 5000 * MIB}, "disk": {}},
        "round_microbatches": 2,
        "program": ["LOAD 0@w0.0"] * 40,
    }
    (directory / "plan.json").write_text(json.dumps(told))
    about = {
        "schema": 1,
        "started": 1.78e9,
        "model": "LlamaForCausalLM",
        "num_parameters": 8_030_261_248,
        "dtype": "bf16",
        "device": "cuda:0",
        "device_names": ["NVIDIA GeForce RTX 4090"],
        "steps": steps,
        "tokens_per_microbatch": 4096,
        "units": [
            {"index": i, "name": name, "kind": "block", "weight_bytes": 1} for i, name in enumerate(UNITS)
        ],
        "peak_flops_per_s": 165e12,
        "machine": {
            "cpu": {
                "model": {"value": "Example 9950", "status": "reported", "source": "/proc/cpuinfo"},
                "num_physical_cores": {"value": 16, "status": "reported", "source": "/proc/cpuinfo"},
            },
            "num_gpus": {"value": None, "status": "not measured", "source": "nothing"},
        },
    }
    (directory / "run.json").write_text(json.dumps(about))
    config = {
        "model": {"path": "models/llama-3-8b", "dtype": "bf16", "attention": "auto"},
        "data": {"path": "corpus/", "seq_len": 2048},
        "train": {"steps": steps, "microbatches": 4},
        "optimizer": {"lr": 2e-5},
        "memory": {"device": "cuda:0", "device_memory": "20GiB"},
    }
    (directory / "config.yaml").write_text(json.dumps(config))
    parts = [
        {"name": "waiting for weights to arrive", "predicted_s": 0.21, "measured_s": 0.336},
        {"name": "compute", "predicted_s": 0.74, "measured_s": 0.768},
        {"name": "waiting for the optimizer on the host", "predicted_s": 0.08, "measured_s": 0.072},
        {"name": "between steps", "predicted_s": 0.0, "measured_s": 0.024},
    ]
    found = {
        "predicted_step_s": 1.03,
        "measured_step_s": 1.2,
        "measured_steps": 2,
        "parts": parts,
        "lanes": [],
    }
    (directory / "prediction.json").write_text(json.dumps(found))
    (directory / "timeline.json").write_text(to_chrome(timeline()))
    return directory
