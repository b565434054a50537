"""What is to be decided: a model, a machine, a step, what a microbatch takes, the memory, and whether anything fits."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any, TypedDict

from outsize.choices import Home
from outsize.codecs.codec_spec import LOSSLESS3
from outsize.codecs.transport import CodecRates, Transport, Wire
from outsize.errors import ConfigError
from outsize.hardware.machine_spec import Figure, Machine
from outsize.model.sizes.model_spec import ModelSpec, Workload
from outsize.optim.optimizer_spec import StateLayout
from outsize.planner.memory.memory_table import Demand, Tier, gradients_at_home
from outsize.planner.program.stages import Extent
from outsize.planner.search.microbatch_search import smaller_rounds
from outsize.planner.search.offload_balance import UnitRates
from outsize.planner.search.plan_stages import fits_stages
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.step_plan import Budgets, shortage_of
from outsize.planner.simulate.costs import ADAMW_BYTES, UnitTimes, parts_s, step_pace
from outsize.planner.simulate.gpu_times import ROUTED_EAGER, ROUTED_EAGER_ON_SEVERAL, SharedRates, unit_times

NODES = (
    "several nodes: each takes its share of the sequences; the gradient of a unit is reduced and scattered when it is "
    "whole, each node steps its share of the unit, and the weights are gathered; both overlap with what else goes on",
)
EXPERTS = "products of experts reach the same but for what their elements take in the GPU's memory"
# Looking at each operation of a unit costs Python tens of microseconds for each: less than this is not worth it.
LEAST_SELECTED_S = 0.002

CodingRatesOf = Callable[[Transport], "CodingRates"]


class CodingRates(TypedDict, total=False):
    """What `cost_model` is told of codecs that somebody has measured."""

    codec_rates: CodecRates | None
    crossing_rates: dict[str, CodecRates]


class Exchange(TypedDict):
    """What `cost_model` is told of nodes."""

    net_bytes_per_s: float
    wire: Wire


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchCost:
    """What a microbatch takes.

    Attributes:
        demand: bytes.
        times: seconds of its units.
    """

    demand: Demand
    times: UnitTimes


def unmeasured(_: Transport) -> CodingRates:
    """Return the rates of codecs that nobody has measured."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model, a machine and a step.

    Attributes:
        model: its units.
        machine: what computes; with several GPUs their budgets are the same.
        budgets: most bytes in each tier; the device's is of each GPU.
        options: what is decided already; home, microbatches, workers and rates are set by `options_for`.
        home: where weights and optimizer state rest; ``auto`` is the host if the plan fits there.
        auto: crossings of which the codec is to be chosen, see `Transport`; those of ``options`` are the first tried.
        products_open: whether products of Muon may run on the device, if that shortens a step.
        masters_open: whether masters may be planes of their own, if units step on the device sooner so.
        sequences: of an optimizer step, on each node.
        seq_len: tokens of a sequence.
        microbatches: of a step; None lets the search choose.
        workload_of: what a microbatch of so many sequences takes, counted from a config.
        measured: what each of so many microbatches takes, as a trial has measured it; None for what is counted.
        fixed_bytes: what else lies on each device throughout, of a demand that is counted.
        stream_bytes: the same of one more stream that multiplies.
        timed: whether rates of the machine may decide which codecs shorten a step.
        linked: whether a link with a rate of its own lies below the device, so that things may leave it unasked.
        shares_memory: whether the device computes in host memory, so that the disk is right below it.
        net_bytes_per_s: what a node sends, and receives, over the network at once; needed where there are several.
        coding_rates: of codecs, as far as somebody has measured them.
        in_mlp_parts: what ``workload_of`` is where MLPs take their tokens in so many parts; None where they cannot,
            do already, or are not asked about.
        brief: whether plans are compared by what clocks of lanes and of stages tell, instead of simulated.
    """

    model: ModelSpec
    machine: Machine
    budgets: Budgets
    options: PlanOptions
    home: Home = "auto"
    auto: tuple[str, ...] = ()
    products_open: bool = False
    masters_open: bool = False
    sequences: int
    seq_len: int
    microbatches: int | None = None
    workload_of: Callable[[int], Workload] | None = None
    measured: Callable[[int], MicrobatchCost] | None = None
    fixed_bytes: int = 0
    stream_bytes: int = 0
    timed: bool = True
    linked: bool = True
    shares_memory: bool = False
    net_bytes_per_s: Figure | None = None
    coding_rates: CodingRatesOf = unmeasured
    in_mlp_parts: Callable[[int], Callable[[int], Workload]] | None = None
    brief: bool = False

    def __post_init__(self) -> None:
        if self.nodes < 1 or (self.nodes > 1 and self.net_bytes_per_s is None):
            raise ValueError("there is a node, and a network between several")
        if self.workload_of is None and self.measured is None:
            raise ValueError("what a microbatch takes is counted or measured")

    def deciding(self, **changes: Any) -> "Question":
        """Return the question with other ``options``."""
        return replace(self, options=replace(self.options, **changes))

    @property
    def nodes(self) -> int:
        """Machines like this one that share each step, data parallel."""
        return self.options.nodes

    @property
    def num_workers(self) -> int:
        """Devices that share the step."""
        return len(self.machine.gpus)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all nodes."""
        return self.nodes * self.sequences * self.seq_len

    def sequences_per_microbatch(self, microbatches: int) -> int:
        """Return the sequences of the largest microbatch."""
        return -(-self.sequences // microbatches)

    def microbatch(self, microbatches: int) -> MicrobatchCost:
        """Return what each of so many microbatches takes."""
        if self.measured is not None:
            return self.measured(microbatches)
        assert self.workload_of is not None
        work = self.workload_of(self.sequences_per_microbatch(microbatches))
        times = unit_times(self.machine, self.model.compute_dtype, work)
        return MicrobatchCost(demand=_counted(self, work, times), times=times)

    def round_sizes(self, microbatches: int) -> Iterator[int]:
        """Yield how many of so many microbatches one worker may take in a round, the most first.

        Rounds sum gradients at home, in fp32. Stages are searched with rounds of their own.
        """
        options = self.options
        size = min(options.round_microbatches or microbatches, microbatches)
        yield size
        in_fp32 = options.state is None or options.state.gradients == "fp32"
        if in_fp32 and self.num_workers == 1 and options.round_microbatches is None:
            yield from smaller_rounds(size)

    def options_for(
        self, microbatches: int, home: Tier, times: UnitTimes, round_size: int | None = None
    ) -> PlanOptions:
        """Return what is decided about a plan of so many microbatches with a home there.

        Args:
            microbatches: of a step.
            home: where weights and optimizer state rest.
            times: of a microbatch.
            round_size: microbatches of a round of one worker; None for those that are asked for, or all.
        """
        options = self.options
        in_a_round = round_size or options.round_microbatches or microbatches
        transport = options.transport if home == "host" else replace(options.transport, weights="raw")
        state = options.state or StateLayout(dtype=self.model.dtype)
        peers = frozenset((peer.source, peer.target) for peer in self.machine.peers)
        return replace(
            options,
            home=home,
            below="disk" if home == "disk" and self.shares_memory else "host",
            may_be_on_disk=self.home == "host" and self.machine.disk is not None,
            state=gradients_at_home(
                state,
                clip=options.clip,
                num_workers=self.num_workers,
                nodes=self.nodes,
                transport=transport,
                rounds=in_a_round < microbatches,
            ),
            microbatches=microbatches,
            round_microbatches=in_a_round if in_a_round < microbatches else None,
            most_microbatches=self.sequences,
            num_workers=self.num_workers,
            transport=transport,
            rates=self._rates(times, home),
            peers=frozenset() if options.handover == "host" else peers,
            leaves_unasked=self.linked and self.nodes == 1,  # nodes exchange things in the same order
        )

    def _rates(self, times: UnitTimes, home: Tier) -> UnitRates:
        """Return what a device does while all of them do: all links at once move no more than host memory gives."""
        machine, count = self.machine, self.num_workers
        state = self.options.state or StateLayout(dtype=self.model.dtype)
        stepped = min(machine.host.adamw_params_per_s.value * ADAMW_BYTES, machine.host.bytes_per_s.value)
        most = machine.host.bytes_per_s.value / count if count > 1 else inf
        disk = machine.disk if home == "disk" else None
        return UnitRates(
            times=times,
            up_bytes_per_s=min(most, *(link.up_bytes_per_s.value for link in machine.links)),
            down_bytes_per_s=min(most, *(link.down_bytes_per_s.value for link in machine.links)),
            home_up_bytes_per_s=inf if disk is None else disk.read_bytes_per_s.value / count,
            home_down_bytes_per_s=inf if disk is None else disk.write_bytes_per_s.value / count,
            host_step_s=state.step_bytes / step_pace(state) / 4 / stepped,
            decode_s=tuple(parts_s(unit, machine.gpus[0]) for unit in self.model.units),
            update_s=state.update_bytes / 4 / machine.gpus[0].memory_bytes_per_s.value,
            shared=SharedRates(host=machine.host.bytes_per_s.value, uplinks=_uplinks(machine)),
        )


def _uplinks(machine: Machine) -> tuple[tuple[float, float], ...]:
    """Return the rate of each uplink, and the share of the devices that are behind its switch."""
    behind = Counter(link.switch for link in machine.links)
    return tuple((rate.value, behind[name] / len(machine.links)) for name, rate in machine.uplinks.items())


def in_seconds(demand: Demand, times: UnitTimes) -> Demand:
    """Return ``demand`` with what choices of activations gain on the machine that has ``times``."""
    selected = {
        extent: times.spared_s[extent] for extent in demand.selected_bytes if extent in times.spared_s
    }
    recompute_s = times.recompute_s or times.forward_s
    return replace(demand, recompute_s=recompute_s, selected_s=selected, least_selected_s=LEAST_SELECTED_S)


def _counted(question: Question, work: Workload, times: UnitTimes) -> Demand:
    """Return what computing takes besides weights where a config tells it."""
    model = question.model
    selected = {Extent.ATTENTION: work.attention_bytes, Extent.PRODUCTS: work.products_bytes}
    # The rest is the norm before the head, and the table of tied embeddings, which the first unit looks up.
    tied = not model.units[0].all_tensors
    rest_trains = any(unit.trainable for unit in model.units[model.num_streamed :])
    users = {model.num_streamed - 1, *([0] if tied else [])} if rest_trains else set()
    demand = Demand(
        boundary_bytes=work.boundary_bytes,
        forward_workspace_bytes=work.forward_workspace_bytes,
        backward_workspace_bytes=work.backward_workspace_bytes,
        saved_bytes=work.saved_bytes,
        selected_bytes=selected if work.attention_bytes else {},
        shared_bytes=work.held_bytes,
        fixed_bytes=question.fixed_bytes,
        stream_bytes=question.stream_bytes,
        rest_users=frozenset(users),
    )
    return in_seconds(demand, times)


def exchange_of(question: Question) -> Exchange:
    """Return what `cost_model` is told of nodes."""
    rate = question.net_bytes_per_s
    return {"net_bytes_per_s": 0.0 if rate is None else rate.value, "wire": question.options.wire}


def assumptions_of(question: Question) -> tuple[str, ...]:
    """Return what is taken for granted of experts, and of several nodes, for people."""
    counted, nodes = question.workload_of, NODES if question.nodes > 1 else ()
    if counted is None or not counted(1).routed_flops:
        return nodes
    share = ROUTED_EAGER_ON_SEVERAL if question.num_workers > 1 else ROUTED_EAGER
    eager = f"products of experts reach {share:.0%} of that, with tokens gathered and scattered around them"
    return (EXPERTS if all(gpu.fused for gpu in question.machine.gpus) else eager, *nodes)


def tiers_of(question: Question) -> tuple[Tier, ...]:
    """Return where the home may be, the fastest first.

    Raises:
        ConfigError: on a disk that the machine does not have.
    """
    homes: dict[str, tuple[Tier, ...]] = {"host": ("host",), "disk": ("disk",), "auto": ("host", "disk")}
    if question.home == "disk" and question.machine.disk is None:
        raise ConfigError(f"{question.machine.name} has no disk to keep anything on")
    return homes[question.home] if question.machine.disk is not None else ("host",)


def fits_at_all(question: Question) -> bool:
    """Return whether anything fits with the microbatches that ``question`` names; nothing is simulated."""
    count = question.microbatches
    assert count is not None
    one, sizes = question.microbatch(count), list(question.round_sizes(count))

    def fits(tier: Tier, size: int) -> bool:
        options = question.options_for(count, tier, one.times, size)
        if options.num_workers > 1:
            return fits_stages(question.model, one.demand, question.budgets, options)
        return not shortage_of(question.model, one.demand, question.budgets, options)

    # The smallest round asks for the least, one of all microbatches for the least at home.
    return any(fits(tier, size) for tier in tiers_of(question) for size in {sizes[-1], sizes[0]})


def fits_encoded(question: Question) -> bool:
    """Return whether anything fits with weights as the codec that takes the fewest bytes writes them."""
    return fits_at_all(question.deciding(transport=Transport(weights=LOSSLESS3.name)))
