"""What would a cache of experts move, and what does a fixed set of units save? (replayed, not timed)

Experts: routing is drawn per token and layer from Zipf's law over that layer's experts, in an order of its own, the top
k of each token. A cache holds a share of all experts. When a layer is reached, the experts that the batch has chosen
must be there, and those missing are moved; then the cache is cut back to its size:

* ``counters``: the cache of `outsize.inference` itself, by access counters that decay, so that what was hot gives way
  when routing drifts;
* ``lru``: what was used longest ago goes;
* ``known``: the counters are the true probabilities, which is the best that anything can do that does not see the
  future, since draws are independent (Aho, Denning and Ullman 1971);
* ``belady``: what is needed farthest in the future goes (Belady 1966), the least that can be moved.

Units: a dense model visits every unit once per token. What moves per token with a fixed set, and with LRU.

Training: a unit comes up once per pass and serves all tokens of a step. Which share of a layer's experts do they touch?
What they leave untouched is all that fetching by expert could save.

    python bench/bench_experts.py                    # the same in every run; about a minute
"""

import argparse
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import common

from outsize.inference.experts import ExpertCache, Experts
from outsize.model.sizes.model_spec import TensorSpec, pack_unit

LAYERS, EXPERTS, TOP, STEPS = 4, 64, 4, 150
TARGET = 1.1
STEP_TOKENS = (16, 128, 1024, 8192, 32768)
Key = tuple[int, int]
Trace = list[list[Key]]


def routing(alpha: float, batch: int, seed: int = 0) -> tuple[Trace, dict[Key, float]]:
    """Experts that are needed, visit by visit, and the probability of each that a token wants it."""
    generator = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, EXPERTS + 1) ** alpha
    orders = [generator.permutation(EXPERTS) for _ in range(LAYERS)]
    trace: Trace = []
    for _ in range(STEPS):
        for layer in range(LAYERS):
            noisy = np.log(weights) + generator.gumbel(size=(batch, EXPERTS))
            chosen = np.unique(np.argsort(-noisy, axis=1)[:, :TOP])
            trace.append([(layer, int(orders[layer][rank])) for rank in chosen])
    share = weights / weights.sum()
    return trace, {(n, int(orders[n][r])): float(share[r]) for n in range(LAYERS) for r in range(EXPERTS)}


def by_worth(
    trace: Trace, places: int, worth: Callable[[Key, int], float], seen: Callable[[Key, int], None]
) -> int:
    """Experts moved by a cache that drops what is worth least."""
    held: set[Key] = set()
    moved = 0
    for now, needed in enumerate(trace):
        for key in needed:
            moved += key not in held
            held.add(key)
            seen(key, now)
        for key in sorted(held, key=lambda key: worth(key, now))[: max(len(held) - places, 0)]:
            held.remove(key)
    return moved


class Layer(nn.Module):
    """Experts of one number each, which compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.weight = nn.Parameter(torch.zeros(EXPERTS, 1), requires_grad=False)

    def forward(self, top_k_index: torch.Tensor) -> None:
        pass


class CountingSource:
    """A home that counts the experts which are fetched from it."""

    def __init__(self) -> None:
        self.moved = 0

    def table(self, unit: int, tensor: TensorSpec) -> None:
        pass

    def rows(self, unit: int, tensor: TensorSpec, rows: torch.Tensor) -> torch.Tensor:
        self.moved += len(rows)
        return torch.zeros(len(rows), 1)


def counters(trace: Trace, places: int) -> int:
    """Experts moved by the cache that generates."""
    layers, source = [Layer() for _ in range(LAYERS)], CountingSource()
    weight = pack_unit(0, "layer", "block", [("weight", (EXPERTS, 1), False, False)]).tensors[0]
    cache = ExpertCache(
        [Experts(unit, layer, "top_k_index", {"weight": weight}) for unit, layer in enumerate(layers)], source
    )
    cache.shrink(places * layers[0].weight[0].nbytes)
    with cache.active():
        for needed in trace:
            layers[needed[0][0]](torch.tensor([[expert for _, expert in needed]]))
    return source.moved


def lru(trace: Trace, places: int) -> int:
    held: OrderedDict[Key, None] = OrderedDict()
    moved = 0
    for needed in trace:
        for key in needed:
            moved += key not in held
            held[key] = None
            held.move_to_end(key)
        while len(held) > places:
            held.popitem(last=False)
    return moved


def belady(trace: Trace, places: int) -> int:
    following: dict[Key, int] = {}
    needs: list[dict[Key, int]] = [{} for _ in trace]
    for now in range(len(trace) - 1, -1, -1):
        for key in trace[now]:
            needs[now][key] = following.get(key, len(trace) + 1)
            following[key] = now
    again: dict[Key, int] = {}

    def seen(key: Key, now: int) -> None:
        again[key] = needs[now][key]

    return by_worth(trace, places, lambda key, now: -again[key], seen)


def experts() -> list[dict[str, Any]]:
    rows = []
    for alpha in (1.0, 1.2, 1.5):
        for batch in (1, 8):
            trace, share = routing(alpha, batch)
            for held in (0.25, 0.5, 0.75):
                places = int(LAYERS * EXPERTS * held)
                least = belady(trace, places)
                row = {
                    "alpha": alpha,
                    "batch": batch,
                    "held": held,
                    "needed": sum(map(len, trace)),
                    "belady": least,
                }
                row["all_experts"] = STEPS * LAYERS * EXPERTS
                row["counters"] = counters(trace, places)
                row["known"] = by_worth(trace, places, lambda key, now: share[key], lambda key, now: None)  # noqa: B023
                row["lru"] = lru(trace, places)
                row["counters_to_belady"] = row["counters"] / least
                row["known_to_belady"] = row["known"] / least
                row["counters_to_known"] = row["counters"] / row["known"]
                rows.append(row)
    return rows


def touched() -> list[dict[str, Any]]:
    """Shares of a layer's experts that the tokens of a step choose, for mixtures of today; alpha 0 is balanced."""
    rows = []
    for experts_, top in ((8, 2), (128, 8), (256, 8)):
        for alpha in (0.0, 1.0, 1.5):
            generator = np.random.default_rng(0)
            weights = np.log(1.0 / np.arange(1, experts_ + 1) ** alpha)
            seen: set[int] = set()
            row: dict[str, Any] = {"experts": experts_, "top": top, "alpha": alpha}
            done = 0
            for tokens in STEP_TOKENS:
                noisy = weights + generator.gumbel(size=(tokens - done, experts_))
                seen.update(np.unique(np.argpartition(-noisy, top, axis=1)[:, :top]).tolist())
                row[f"{tokens} tokens"] = len(seen) / experts_
                done = tokens
            rows.append(row)
    return rows


def bytes_moved_by_lru(weight_bytes: Sequence[int], room_bytes: int, num_passes: int) -> int:
    """What a cache that drops the unit used longest ago would move in so many passes."""
    held: OrderedDict[int, int] = OrderedDict()
    moved = 0
    for _ in range(num_passes):
        for unit, size in enumerate(weight_bytes):
            if unit in held:
                held.move_to_end(unit)
                continue
            moved += size
            while held and sum(held.values()) + size > room_bytes:
                held.popitem(last=False)
            held[unit] = size
    return moved


def units() -> list[dict[str, Any]]:
    from outsize.planner.search.forward_plan import plan_scan

    count, tokens, size = 32, 50, 1_000
    rows = []
    for places in (8, 16, 24, 31, 32):
        scan = plan_scan([size] * count, places * size)
        rows.append(
            {
                "units": count,
                "room_in_units": places,
                "fixed_set": scan.bytes_per_pass / size,
                "lru": bytes_moved_by_lru([size] * count, places * size, tokens) / tokens / size,
                "least": max(count - places, 0),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=None)
    args = parser.parse_args()
    found, dense, training = experts(), units(), touched()
    names = ["alpha", "batch", "held", "needed", "belady", "counters", "known", "lru"]
    ratios = ["counters_to_belady", "known_to_belady", "counters_to_known"]
    headers = [*names, *ratios]
    common.print_table(headers, [[row[name] for name in headers] for row in found], "experts moved")
    columns = ["units", "room_in_units", "fixed_set", "lru", "least"]
    common.print_table(columns, [[row[c] for c in columns] for row in dense], "units moved per token")
    columns = list(training[0])
    common.print_table(
        columns, [list(row.values()) for row in training], "share of a layer's experts in a step"
    )
    worst = max(row["counters_to_belady"] for row in found)
    result = {
        "experts": found,
        "units": dense,
        "training": training,
        "layers": LAYERS,
        "experts_per_layer": EXPERTS,
        "top": TOP,
        "tokens": STEPS,
        "target": TARGET,
        "worst_counters_to_belady": worst,
        "worst_counters_to_known": max(row["counters_to_known"] for row in found),
        "reached": worst <= TARGET,
        "reachable_without_the_future": max(row["known_to_belady"] for row in found) <= TARGET,
    }
    common.finish(result, args.output)


if __name__ == "__main__":
    main()
