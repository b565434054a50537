"""Passes for what lies below the device: optimizer tiles through a ring, whole units through host buffers.

They come last. What they insert lies between the disk and host memory; the device's side of the program stays
as it is, except that gradients which pass through the ring leave in tiles.
"""

from collections.abc import Mapping
from dataclasses import replace

from outsize.planner.program.ops import Kind, Op
from outsize.planner.program.program import Program
from outsize.planner.program.step_layout import StepLayout


def insert_disk(program: Program, layout: StepLayout) -> Program:
    """Stage units through host buffers where the layout says so, cut the optimizer's steps into tiles, and commit."""
    if layout.staged:
        program = _stage(program, layout)
    if any(layout.tiles):
        program = _tile(program, layout)
    return Program((*program.ops, Op(kind=Kind.COMMIT))) if layout.commits else program


def _stage(program: Program, layout: StepLayout) -> Program:
    """Put a READ before every LOAD and a WRITE after every GRAD, with a host buffer between them.

    With two buffers or more, weights and gradients have buffers of their own, so that a READ ahead of its
    time does not wait for a gradient. Gradients that pass through a ring need none.
    """
    num_gradients = 0 if layout.ring else layout.num_host_buffers // 2
    num_weights = layout.num_host_buffers - num_gradients
    gradients = range(num_weights, layout.num_host_buffers) or range(1)
    loads = grads = 0
    ops: list[Op] = []
    for op in program:
        if op.kind is Kind.LOAD:
            buffer = loads % num_weights
            loads += 1
            ops += (Op(kind=Kind.READ, unit=op.unit, buffer=buffer), replace(op, buffer=buffer))
        elif op.kind is Kind.GRAD and not layout.ring:
            buffer = gradients[grads % len(gradients)]
            grads += 1
            ops += (replace(op, buffer=buffer), Op(kind=Kind.WRITE, unit=op.unit, buffer=buffer))
        else:
            ops.append(op)
    return Program(tuple(ops))


def _tile(program: Program, layout: StepLayout) -> Program:
    """Replace each run of STEPs of tiled units by their tiles, READs as far ahead as there are buffers.

    Where gradients pass through the ring, the GRAD before a STEP goes with its tiles.
    """
    ops: list[Op] = []
    pending: list[tuple[int, int]] = []
    workers: dict[int, int | None] = {}
    done = 0
    for op in program:
        if op.kind is Kind.GRAD and op.unit is not None and layout.ring:
            workers[op.unit] = op.worker
            continue
        if op.kind is Kind.STEP and op.unit is not None and layout.tiles[op.unit]:
            pending += [(op.unit, tile) for tile in range(layout.tiles[op.unit])]
            continue
        ops += _pipeline(pending, done, layout, workers)
        done += len(pending)
        pending = []
        ops.append(op)
    ops += _pipeline(pending, done, layout, workers)
    return Program(tuple(ops))


def _pipeline(
    tiles: list[tuple[int, int]], done: int, layout: StepLayout, workers: Mapping[int, int | None]
) -> list[Op]:
    """Return READ, GRAD, STEP and WRITE of ``tiles``, each READ right after the WRITE that frees its buffer.

    READs and WRITEs are those of a home on disk, GRADs those of gradients that pass through the ring; each GRAD then
    comes right behind what fills or frees its buffer, so that it runs ahead of the STEPs.
    """
    num_buffers = layout.num_tile_buffers

    def on_tile(kind: Kind, index: int) -> Op:
        unit, tile = tiles[index]
        return Op(kind=kind, unit=unit, tile=tile, buffer=(done + index) % num_buffers)

    def fill(index: int) -> list[Op]:
        read = [on_tile(Kind.READ, index)] if layout.tiles_on_disk else []
        if not layout.ring:
            return read
        return [*read, replace(on_tile(Kind.GRAD, index), worker=workers[tiles[index][0]])]

    ops = [op for index in range(min(num_buffers, len(tiles))) for op in fill(index)]
    for index in range(len(tiles)):
        ops.append(on_tile(Kind.STEP, index))
        if layout.tiles_on_disk:
            ops.append(on_tile(Kind.WRITE, index))
        if index + num_buffers < len(tiles):
            ops += fill(index + num_buffers)
    return ops
