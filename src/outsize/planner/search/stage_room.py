"""What host memory gives to a home on disk under several workers: optimizer tiles, and buffers for whole units."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from outsize.model.sizes.model_spec import ModelSpec
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.sizing import LEAST_HOST_BUFFERS, NUM_TILE_BUFFERS, PlanOptions, Sizing


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRoom:
    """Room in host memory; nothing of it for a home that lies there.

    Attributes:
        tile_elements: per optimizer tile.
        num_host_buffers: that whole units pass through, for all workers together.
        host_buffer_bytes: of each.
    """

    tile_elements: int = 0
    num_host_buffers: int = 0
    host_buffer_bytes: int = 0


def rooms(model: ModelSpec, options: PlanOptions, num_workers: int) -> Iterator[HostRoom]:
    """Yield what there may be room for, the most first: for each worker a buffer each way, and large tiles."""
    if options.home != "disk":
        yield HostRoom()
        return
    sizing = Sizing(model, options)
    least = sizing.least()
    for knobs in (*reversed(list(sizing.larger_tiles(least))), least):
        for count in dict.fromkeys((2 * num_workers, LEAST_HOST_BUFFERS)):
            yield HostRoom(
                tile_elements=knobs.tile_elements,
                num_host_buffers=count,
                host_buffer_bytes=sizing.host_buffer_bytes,
            )


def in_room(model: ModelSpec, layout: StepLayout, options: PlanOptions, room: HostRoom) -> StepLayout:
    """Return ``layout`` over the home of ``options``, with the tiles and buffers of ``room``."""
    own = layout.own_elements or tuple(unit.numel for unit in model.units)
    tiles = tuple(
        -(-own[unit.index] // room.tile_elements) if room.tile_elements and unit.trainable else 0
        for unit in model.units
    )
    return replace(
        layout,
        tiles=tiles,
        num_tile_buffers=NUM_TILE_BUFFERS if any(tiles) else 0,
        num_host_buffers=room.num_host_buffers,
        staged=room.num_host_buffers > 0,
        tiles_on_disk=options.home == "disk",
        commits=options.commits and options.home == "disk",
    )


def state_of(model: ModelSpec, options: PlanOptions) -> StateLayout:
    """Return how a trained unit lies at home; gradients are summed there from round to round."""
    return options.state or StateLayout(dtype=model.dtype)
