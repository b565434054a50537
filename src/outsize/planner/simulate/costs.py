"""What ops take on a machine: seconds for what computes, bytes through named resources for what moves.

Resources: ``up:w0`` and ``down:w0`` (a worker's link), ``uplink:NAME:up`` and ``:down`` (a switch of several links),
``host memory`` (reads and writes together), ``optimizer`` (what its cores can do), ``disk read`` and ``disk write``,
and ``network`` (what a node sends, and receives at the same time).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from outsize.codecs.codec_spec import codec_spec, raw_bytes
from outsize.codecs.transport import EXACT, PIECE_ELEMENTS, PIECES_AT_ONCE, CodecRates, Transport, Wire
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import Gpu, Machine
from outsize.model.sizes.model_spec import ITEMSIZE, ModelSpec, UnitSpec
from outsize.optim.optimizer_spec import UPDATE_TILE_ELEMENTS, StateLayout, layout_of
from outsize.planner.memory.memory_table import NO_CODECS, Tier
from outsize.planner.memory.step_bytes import NOTHING, encoded_planes
from outsize.planner.memory.traffic import OpBytes
from outsize.planner.program.program import Kind, Lane, Op
from outsize.planner.program.stages import Choice, Extent, KeptBytes
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.program.table import ACTIVATIONS, AT_REST, ROWS, Price
from outsize.planner.simulate.discrete import Cost
from outsize.planner.simulate.simulator import CostModel

# What rates of optimizers are told for: AdamW reads master, two moments and the gradient, and writes all but the
# gradient, each in fp32.
ADAMW_BYTES = 28
# How fast a step over moments of fewer bits moves its bytes beside one over fp32: what it saves in memory it spends in
# part on rounding. Two cores, bench/results/optimizer_2core_2026-11.json: 19.3 and 18.8 of 24.1 GB/s.
STEP_PACE = {"fp32": 1.0, "bf16": 0.80, "int8": 0.78}
# Masters of 24 bits spend what they save: beside 8-bit moments as many parameters a second as those of 32. Two cores,
# the same file: 17.9 of 20.7 GB/s.
SPLIT24_PACE = 0.87
# The same of a class of torch, op by op over pieces that stay in a cache: 0.2 to 0.4 of the bytes per second of the
# kernel of AdamW, SGD, Adam, RMSprop and Adagrad by turns on two busy cores.
TORCH_PACE = 0.25
# Two flushes of a disk's own cache: some milliseconds each on an NVMe drive.
COMMIT_S = 0.01
# An exchange over TCP between machines of one room: a round trip of some ten microseconds, and threads that wake up.
EXCHANGE_S = 1e-4
# Of decoding a piece, and what a launch takes of the thread that asks for it: torch's own 5 to 10 microseconds, not
# measured.
DECODE_KERNELS, LAUNCH_S = 4, 6e-6
# The same of a step on a device: clip, join, step and split.
UPDATE_KERNELS = 16
NO_RATES: Mapping[str, CodecRates] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitTimes:
    """Seconds that a worker computes for one microbatch.

    Attributes:
        forward_s: of each streamed unit.
        backward_s: of each, its recompute included; of the last unit, forward and loss included.
        recompute_s: of each; a whole forward where it is empty.
        spared_s: of each, the part of its recompute that is spared where attention, or products, were kept.
        kept_forward_s: of each, where it keeps all that its backward needs; `forward_s` where it is empty.
        kept_backward_s: of each, behind such a forward; the backward less its recompute where it is empty.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    recompute_s: tuple[float, ...] = ()
    spared_s: Mapping[Extent, Sequence[float]] = field(default_factory=dict)
    kept_forward_s: tuple[float, ...] = ()
    kept_backward_s: tuple[float, ...] = ()

    def forward(self, kind: Kind, unit: int) -> float:
        """Return the seconds of a forward of that kind."""
        return ((kind is Kind.FORWARD_KEEP and self.kept_forward_s) or self.forward_s)[unit]

    def backward(self, choice: Choice, unit: int) -> float:
        """Return the seconds of the backward of ``unit`` where ``choice`` has kept something of its forward."""
        if choice.extent is Extent.WHOLE and self.kept_backward_s:
            return self.kept_backward_s[unit]
        # Where both were timed, of very small units, the recompute may have come out as the longer one.
        return max(0.0, self.backward_s[unit] - self.spared(choice, unit))

    def recompute(self, unit: int) -> float:
        """Return the seconds that a recompute of ``unit`` takes."""
        return (self.recompute_s or self.forward_s)[unit]

    def spared(self, choice: Choice, unit: int) -> float:
        """Return the seconds of the recompute of ``unit`` that ``choice`` spares its backward."""
        if choice.extent is None or choice.extent is Extent.WHOLE:
            return self.recompute(unit) if choice.extent else 0.0
        parts = self.spared_s.get(choice.extent)
        return min(self.recompute(unit), parts[unit]) if parts else 0.0


def cost_model(
    machine: Machine,
    model: ModelSpec,
    layout: StepLayout,
    times: UnitTimes,
    boundary_bytes: Sequence[int],
    *,
    home: Tier = "host",
    below: Tier = "host",
    tile_elements: int = 0,
    transport: Transport = NO_CODECS,
    state: StateLayout | None = None,
    net_bytes_per_s: float = 0.0,
    kept_bytes: KeptBytes = NOTHING,
    codec_rates: CodecRates | None = None,
    wire: Wire = EXACT,
    crossing_rates: Mapping[str, CodecRates] = NO_RATES,
) -> CostModel:
    """Return the costs of the ops of ``layout`` on ``machine``, worker w being its GPU w.

    Of several nodes that share the step, each is such a machine. Where nobody has measured ``codec_rates``, weights are
    taken to be encoded as their codec assumes, and decoded in no time. What else a lane encodes takes none where nobody
    has measured ``crossing_rates``, of ``gradients`` and of ``activations``.

    Raises:
        ConfigError: a tier that the machine does not have.
    """
    if "disk" in (home, below) and machine.disk is None:
        raise ConfigError(f"{machine.name} has no disk to keep anything on")
    host, disk = machine.host, machine.disk
    capacity = {
        "host memory": host.bytes_per_s.value,
        "optimizer": host.adamw_params_per_s.value * ADAMW_BYTES,
        **{Lane(way, w): rate for w in range(len(machine.gpus)) for way, rate in _rates(machine, w)},
        **{Lane("peer", peer.source, peer.target): peer.bytes_per_s.value for peer in machine.peers},
        **{f"uplink:{name}:{way}": f.value for name, f in machine.uplinks.items() for way in ("up", "down")},
    }
    if disk is not None:
        capacity |= {"disk read": disk.read_bytes_per_s.value, "disk write": disk.write_bytes_per_s.value}
    if layout.num_nodes > 1:
        capacity["network"] = net_bytes_per_s
    pricing = _Pricing(
        machine=machine,
        model=model,
        layout=layout,
        times=times,
        boundary_bytes=boundary_bytes,
        home=home,
        below=below,
        tile_elements=tile_elements,
        transport=transport,
        state=layout_of(model.dtype if state is None else state),
        kept_bytes=kept_bytes,
        codec_rates=codec_rates,
        wire=wire,
        crossing_rates=crossing_rates,
    )
    return CostModel(cost_of=_remembered(pricing.cost_of, layout), capacity=capacity)


# Ops whose price depends on what becomes of what their forward has kept.
_BY_CHOICE = frozenset(
    row.kind for row in ROWS if row.price in ("recompute", "backward") or row.carries == "kept"
)


def _remembered(price: Callable[[Op], Cost], layout: StepLayout) -> Callable[[Op], Cost]:
    """Return ``price``, asked once for all microbatches of a unit: they cost the same, but for a B of what was kept."""
    cost_by_key: dict[tuple[Kind, int | None, int | None, int | None, bool, Choice, int | None], Cost] = {}

    def cost_of(op: Op) -> Cost:
        depends = op.kind in _BY_CHOICE
        choice = layout.choice(op.unit or 0, op.microbatch or 0) if depends else Choice.RECOMPUTE
        key = (op.kind, op.unit, op.worker, op.tile, op.buffer is None, choice, op.target)
        cost = cost_by_key.get(key)
        if cost is None:
            cost = cost_by_key[key] = price(op)
        return cost

    return cost_of


def step_pace(state: StateLayout) -> float:
    """Return the rate of bytes of a step over that of one over fp32 moments."""
    pace = STEP_PACE[state.moments] if state.num_moments else TORCH_PACE
    return pace * SPLIT24_PACE if state.masters == "split24" else pace


def parts_s(unit: UnitSpec, gpu: Gpu) -> float:
    """Return what a device takes to decode the frozen parts of ``unit``; a host's cores are not priced."""
    seconds, memory = 0.0, gpu.memory_bytes_per_s.value
    cores = [gpu.peak_flops_per_s["fp32"].value] if "fp32" in gpu.peak_flops_per_s else []
    for part in unit.frozen if not gpu.is_host else ():
        if part.codec is not None:
            element_s = codec_spec(part.codec).element_s(memory, *cores)
            seconds += part.numel * element_s + DECODE_KERNELS * LAUNCH_S
    return seconds


def _rates(machine: Machine, worker: int) -> tuple[tuple[str, float], ...]:
    link = machine.links[worker]
    return ("up", link.up_bytes_per_s.value), ("down", link.down_bytes_per_s.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pricing(OpBytes):
    machine: Machine
    times: UnitTimes
    codec_rates: CodecRates | None
    wire: Wire
    crossing_rates: Mapping[str, CodecRates]

    def cost_of(self, op: Op) -> Cost:
        """Return the cost of any op."""
        return _PRICES[op.row.price](self, op)

    def _forward(self, op: Op) -> Cost:
        unit = op.unit or 0
        return Cost(seconds=self.times.forward(op.kind, unit) + self._beside_s(unit))

    def _recompute(self, op: Op) -> Cost:
        unit = op.unit or 0
        spared_s = self.times.spared(self.layout.choice(unit, op.microbatch or 0), unit)
        return Cost(seconds=max(0.0, self.times.recompute(unit) - spared_s))

    def _backward(self, op: Op) -> Cost:
        unit, stages = op.unit or 0, self.layout.stages
        # An R has recomputed it, or its forward kept it.
        apart = stages is not None and unit < stages.backward[0][0]
        choice = Choice.KEEP if apart else self.layout.choice(unit, op.microbatch or 0)
        beside_s = self._beside_s(unit) if op.row.price == "turn" else 0.0
        return Cost(seconds=self.times.backward(choice, unit) + beside_s)

    def _norm(self, op: Op) -> Cost:
        rate = self.machine.gpus[op.worker or 0].memory_bytes_per_s.value
        return Cost(seconds=self.layout.gradient_bytes[op.unit or 0] / rate)

    def _link(self, op: Op) -> Cost:
        """Return the cost of a copy over the link, with what the lane encodes and decodes beside it."""
        unit, row, size = op.unit or 0, op.row, self.on_link(op)
        if row.carries in AT_REST and unit in self.layout.resident:
            return Cost()
        copy = self._copy(op, size, row.lane, row.carries in ACTIVATIONS or op.buffer is None)
        coding_s = 0.0
        if row.carries == "input":  # other activations go as they are
            saves = row.lane == "down"
            sent_bytes = self.boundary_bytes[unit]
            coding_s = self._coding_s("activations", sent_bytes, encode=saves, decode=not saves)
        elif row.carries == "weights":
            coding_s = self._decode_s(op, size) + self._parts_s(op)
        elif row.carries == "gradient" and op.tile is None:
            coding_s = self._coding_s("gradients", self.layout.gradient_bytes[unit], encode=True, decode=True)
        # A sum comes up from its home itself, through no host buffer.
        staged = row.carries == "sum" and (self.home, self.below) == ("disk", "host")
        through = (*copy.through, "disk read") if staged else copy.through
        return replace(copy, seconds=copy.seconds + coding_s, through=through)

    def _disk(self, op: Op) -> Cost:
        disk = "disk read" if op.row.lane in ("read", "read:units") else "disk write"
        return Cost(amount=self.on_disk(op), through=(disk, "host memory"))

    def _step(self, op: Op) -> Cost:
        """Return the cost of a STEP: what its elements move, and products of Muon, here or on the device of the unit.

        A STEP waits for its products wherever they are. A device shares itself among them and the units that it
        computes meanwhile; so they are in the time of the forwards of the unit as well (`_beside_s`).
        """
        unit, through = self.model.units[op.unit or 0], ("optimizer", "host memory")
        moved = self.state.step_bytes_of(unit, self.elements(op)) / step_pace(self.state)
        cost = Cost(seconds=self._encode_s(op), amount=round(moved), through=through)
        (count, size), flops = self.state.products_of(unit), self.state.step_flops_of(unit)
        if not size:
            return replace(cost, seconds=cost.seconds + flops / self.machine.host.products.value)
        there = Op(kind=op.kind, unit=op.unit, worker=unit.index % self.layout.num_workers)
        up, down = (self._copy(there, size, way, False) for way in ("up", "down"))
        latency_s = count * up.seconds
        up = replace(up, seconds=latency_s + self._on_device_s(unit, there.worker or 0))
        return replace(cost, then=replace(up, then=replace(down, seconds=latency_s)))

    def _update(self, op: Op) -> Cost:
        unit = self.model.units[op.unit or 0]
        launches = UPDATE_KERNELS * -(-unit.numel // UPDATE_TILE_ELEMENTS)
        rate = self.machine.gpus[op.worker or 0].memory_bytes_per_s.value
        return Cost(seconds=max(self.state.update_bytes * unit.numel / rate, launches * LAUNCH_S))

    def _beside_s(self, unit: int) -> float:
        """Return what products of Muon of a unit on a device take from it, as a part for each of its forwards."""
        if not self.state.products_on_device:
            return 0.0
        stepped = self.model.units[unit]
        on_device_s = self._on_device_s(stepped, stepped.index % self.layout.num_workers)
        return on_device_s / self.layout.num_microbatches

    def _on_device_s(self, unit: UnitSpec, worker: int) -> float:
        return self.state.step_flops_of(unit) / self.machine.gpus[worker].products.value

    def _encode_s(self, op: Op) -> float:
        """Return what encoding the weights of a unit takes on one core, once all of them have changed.

        That is behind its STEP, or its last one where it goes in tiles; of several nodes behind its GATHER. Frozen
        parts were encoded before the run.
        """
        gathers = op.row.lane == "net:gather"
        last = op.row.price == "step" if self.layout.num_nodes == 1 else gathers
        if not last or self.transport.is_raw("weights"):
            return 0.0
        numel = self.model.units[op.unit or 0].numel
        if op.tile is not None and (op.tile + 1) * self.tile_elements < numel:
            return 0.0
        rates = self.codec_rates or self.transport.spec("weights")
        return numel * ITEMSIZE[self.model.dtype] / rates.encode_bytes_per_s

    def _decode_s(self, op: Op, sent_bytes: int) -> float:
        """Return what decoding adds to a LOAD: of all but the last pieces, what it takes longer than the link."""
        if self.codec_rates is None or self.transport.is_raw("weights"):
            return 0.0
        stays = op.unit in self.layout.stays
        planes = list(encoded_planes(self.model.units[op.unit or 0], self.model.dtype, stays=stays))
        pieces = max(1, sum(-(-numel // (PIECES_AT_ONCE * PIECE_ELEMENTS)) for _, numel, _ in planes))
        num_bytes = sum(numel * ITEMSIZE[dtype] for _, numel, dtype in planes)
        decode_s = num_bytes / self.codec_rates.decode_bytes_per_s
        link_s = sent_bytes / self.machine.links[op.worker or 0].up_bytes_per_s.value
        return max(0.0, decode_s - link_s) * (pieces - 1) / pieces + decode_s / pieces

    def _parts_s(self, op: Op) -> float:
        """Return what decoding frozen parts adds to a LOAD: a device makes their values behind the copy.

        What its kernels move of its own memory, and their launches, as Triton has them: torch for CUDA and ROCm on
        Linux brings it. A host's cores are not priced.
        """
        unit = op.unit or 0
        stays = unit in self.layout.stays
        return 0.0 if stays else parts_s(self.model.units[unit], self.machine.gpus[op.worker or 0])

    def _coding_s(self, crossing: str, num_bytes: int, *, encode: bool, decode: bool) -> float:
        """Return what a lane spends on encoding and decoding so many bytes of a crossing before and behind its copy."""
        rates = self.crossing_rates.get(crossing)
        if rates is None or self.transport.is_raw(crossing):
            return 0.0
        return encode * num_bytes / rates.encode_bytes_per_s + decode * num_bytes / rates.decode_bytes_per_s

    def _exchange(self, op: Op) -> Cost:
        """Return the cost of what a node sends to all others, and receives from them at the same time.

        A reduce-scatter and an all-gather over N nodes each move (N - 1) / N of the bytes in each direction. The lane
        writes and reads codecs itself.
        """
        numel, dtype, nodes = self.model.units[op.unit or 0].numel, self.model.dtype, self.layout.num_nodes
        share = numel // nodes
        if op.row.carries == "gradient":
            size, coding_s = self.wire.gradient_bytes(numel), self.wire.gradient_s(numel - share)
        else:
            size, coding_s = raw_bytes(numel, dtype), 0.0
        sent = size * (nodes - 1) / nodes
        seconds = EXCHANGE_S + coding_s + self._encode_s(op)
        return Cost(seconds=seconds, amount=sent, through=("network", "host memory"))

    def _across(self, op: Op) -> Cost:
        """Return the cost of a copy from device to device: over a wire of its own, or over the links of both."""
        source, target = op.worker or 0, op.target or 0
        peer = self.machine.peer(source, target)
        if peer is None:
            raise ConfigError(
                f"{self.machine.name}: no copies go from GPU {source} to GPU {target} by themselves"
            )
        through: list[str] = [Lane("peer", source, target)]
        if not peer.own_wire:
            through += [Lane("down", source), Lane("up", target)]
            switches = [self.machine.links[gpu].switch for gpu in (source, target)]
            if switches[0] != switches[1]:  # copies behind one switch do not leave it
                through += [
                    f"uplink:{name}:{way}" for name, way in zip(switches, ("down", "up"), strict=True) if name
                ]
        latency_s = self.machine.links[source].latency_s.value
        return Cost(seconds=latency_s, amount=self.boundary_bytes[op.unit or 0], through=tuple(through))

    def _copy(self, op: Op, size: int, way: str, to_home: bool) -> Cost:
        """Return the cost of a copy over the worker's link, and through whatever lies at its other end."""
        worker = op.worker or 0
        link = self.machine.links[worker]
        through: list[str] = [Lane(way, worker), "host memory"]
        if link.switch:
            through.append(f"uplink:{link.switch}:{way}")
        if to_home and self.below == "disk":
            through.append("disk read" if way == "up" else "disk write")
        return Cost(seconds=link.latency_s.value, amount=size, through=tuple(through))


_PRICES: Mapping[Price, Callable[[_Pricing, Op], Cost]] = {
    "free": lambda pricing, op: Cost(),
    "forward": _Pricing._forward,
    "turn": _Pricing._backward,
    "recompute": _Pricing._recompute,
    "backward": _Pricing._backward,
    "norm": _Pricing._norm,
    "link": _Pricing._link,
    "peer": _Pricing._across,
    "step": _Pricing._step,
    "update": _Pricing._update,
    "disk": _Pricing._disk,
    "exchange": _Pricing._exchange,
    "agree": lambda pricing, op: Cost(seconds=EXCHANGE_S),
    "commit": lambda pricing, op: Cost(seconds=COMMIT_S),
}
if missing := {row.price for row in ROWS} - _PRICES.keys():
    raise ValueError(f"nobody says how to find the prices {sorted(missing)}")
