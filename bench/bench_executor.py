"""What does the executor itself cost? Microseconds per op when no op does anything.

Three programs: one lane alone, two lanes that wait for each other at every op, and the step of a real plan: 32 blocks,
8 microbatches, home on disk, so loads, saves, gradients and optimizer tiles on all lanes. What is counted is everything
from `submit` to the return of `wait`: hazards, queues, wake-ups and timeline. The threads of all lanes share one
interpreter, so the time per op is about the processor time per op.

    python bench/bench_executor.py
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

from outsize.model.sizes.model_spec import ModelSpec, pack_unit
from outsize.planner.program.hazards import Hazards
from outsize.planner.program.program import Kind, Op, lane_of
from outsize.planner.search.step_plan import Budgets, Demand, Plan, PlanOptions, plan_step
from outsize.runtime.device.device import CpuDevice
from outsize.runtime.engine.executor import Executor

TARGET_US = 100.0
NUM_UNITS = 34
MIB = 2**20


def one_lane(count: int) -> list[Op]:
    return [Op(kind=Kind.STEP, unit=index % NUM_UNITS) for index in range(count)]


def ping_pong(count: int) -> list[Op]:
    """LOAD and FREE of one slot by turns: every op waits for the one before it, on the other lane."""
    return [
        Op(kind=kind, unit=0, worker=0, slot=0) for _ in range(count // 2) for kind in (Kind.LOAD, Kind.FREE)
    ]


def real_plan(offload: bool) -> Plan:
    """The plan of a Llama-shaped model of 32 blocks of 12.6M parameters, for 8 microbatches."""
    block = [(f"w{i}", (1024, 1024), True, True) for i in range(12)]
    table = [("table", (32_000, 1024), True, True)]
    units = [pack_unit(0, "embedding", "embedding", table)]
    units += [pack_unit(i, f"layers.{i - 1}", "block", block) for i in range(1, NUM_UNITS - 1)]
    units.append(pack_unit(NUM_UNITS - 1, "head", "head", table))
    demand = Demand(
        boundary_bytes=(0, *[8 * MIB] * (NUM_UNITS - 1)), backward_workspace_bytes={"block": 64 * MIB}
    )
    options = PlanOptions(home="disk", below="disk", microbatches=8, offload=offload or None)
    return plan_step(ModelSpec(units=tuple(units), dtype="fp32"), demand, Budgets(device=4096 * MIB), options)


def measure(ops: list[Op], num_streamed: int, repeats: int) -> dict[str, Any]:
    """Run ``ops`` with empty handlers, again and again in one executor as training does."""
    device = CpuDevice()
    executor = Executor(device, lane_of, lambda op, context: None, Hazards(num_streamed, None))
    walls, processor = [], []
    try:
        for repeat in range(repeats + 1):
            before, began = common.Usage.now(), time.perf_counter()
            executor.wait(executor.submit(ops, None))
            wall = time.perf_counter() - began
            executor.events.clear()
            if repeat:  # the first one starts the threads
                walls.append(wall / len(ops) * 1e6)
                processor.append((common.Usage.now() - before).cpu_s / len(ops) * 1e6)
    finally:
        executor.close()
        device.close()
    spread, cpu = common.Spread.of(walls), common.Spread.of(processor)
    return {
        "ops": len(ops),
        "lanes": len({lane_of(op) for op in ops}),
        "us_per_op": spread.median,
        "low": spread.low,
        "high": spread.high,
        "cpu_us_per_op": cpu.median,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ops", type=int, default=4000, help="ops of the two made-up programs")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kept, offloaded = real_plan(offload=False), real_plan(offload=True)
    programs = {
        "one lane": one_lane(arguments.ops),
        "ping-pong": ping_pong(arguments.ops),
        "plan, inputs kept": list(kept.program.ops),
        "plan, inputs saved": list(offloaded.program.ops),
    }
    results = {name: measure(ops, NUM_UNITS, arguments.repeats) for name, ops in programs.items()}
    rows = [
        (name, r["ops"], r["lanes"], r["us_per_op"], r["low"], r["high"], r["cpu_us_per_op"])
        for name, r in results.items()
    ]
    headers = ("program", "ops", "lanes", "us per op", "low", "high", "cpu us")
    common.print_table(headers, rows, title="Executor with empty ops")
    kinds = Counter(op.kind.value for op in offloaded.program.ops)
    print("the plan with saved inputs:", ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    common.finish(
        {
            "bench": "executor",
            "machine": common.machine(),
            "target_us": TARGET_US,
            "ok": all(r["us_per_op"] <= TARGET_US for r in results.values()),
            "programs": results,
        },
        arguments.output,
    )


if __name__ == "__main__":
    main()
