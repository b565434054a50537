"""Which units stay on the device: frozen ones with their weights, those that train with all their state."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outsize.model.sizes.model_spec import ModelSpec
from outsize.planner.search.forward_plan import spread_order

if TYPE_CHECKING:
    from outsize.planner.search.sizing import PlanOptions


def frozen_units(model: ModelSpec) -> list[int]:
    """Return the streamed units with weights that never train."""
    streamed = model.units[: model.num_streamed]
    return [unit.index for unit in streamed if unit.frozen or (unit.tensors and not unit.trainable)]


def spread(units: Sequence[int], number: int) -> frozenset[int]:
    """Return so many of ``units`` that lie evenly among the others."""
    return frozenset(units[index * len(units) // number] for index in range(number))


def resident_order(model: ModelSpec) -> list[int]:
    """Return the units that train in the order in which they become resident.

    First the rest, whose weights and gradient lie on the device in any case. Then others, so that those which are
    resident lie evenly among those which move, however many they are: the link has the time of all to move these.
    """
    trained = [unit.index for unit in model.units if unit.trainable]
    streamed = [unit for unit in trained if unit < model.num_streamed]
    rest = [unit for unit in trained if unit >= model.num_streamed]
    return rest + spread_order(streamed)


def why_not_resident(options: "PlanOptions") -> str:
    """Return why no unit that trains can rest on the device; empty where some can."""
    state, transport = options.state, options.transport
    plain = state is None or (state.exact and not state.whole and state.num_moments == 2)
    reasons = {
        "several workers take turns at units": options.num_workers > 1,
        "ranks share the optimizer's state": options.nodes > 1,
        "a wrapped model keeps its state at home": options.cut,
        "a home on disk keeps all state": options.home == "disk",
        "only AdamW with its exact state steps on a device": not plain,
        "encoded weights and gradients go over the link": not (
            transport.is_raw("weights") and transport.is_raw("gradients")
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
