"""Predict the time of a step, its waits by cause, the resource that ends it, and what that rests on."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import ceil
from typing import Any

from outsize.model.sizes.model_spec import Workload
from outsize.planner.memory.memory_table import Tier
from outsize.planner.predict.decision import Decision, Simulated
from outsize.planner.predict.decision_search import decide
from outsize.planner.predict.question import Question, assumptions_of
from outsize.planner.program.program import render
from outsize.planner.program.stages import Choice, Stages
from outsize.planner.program.step_layout import StepLayout
from outsize.planner.search.stage_memory import ARRIVALS
from outsize.planner.search.step_plan import Plan, Table
from outsize.planner.simulate.simulator import Simulation, Timeline
from outsize.planner.simulate.stalls import waits_by_cause

# A resource that is in use for this share of a step ends it: more of anything else gains little.
FULL_SHARE = 0.85
# Waits below this share of a step are not told.
LEAST_SHARE = 0.001
COMPUTE = "compute"
# The median by which simulated steps missed measured ones whose rates were known (bench/bench_truth.py, 15 runs).
SIMULATED_WITHIN = 0.055
# What mixtures are uncertain by besides: FlexTrain's runs of OLMoE, Qwen3-30B-A3B and Qwen3.5-35B-A3B on a 5090 (its
# repository's verified_runs) are planned up to 23 % too slow, the last, of mostly linear attention, 57 % too fast.
MIXTURES_WITHIN = 0.25

SEVERAL = "several GPUs: ids and labels, masks and position tables of the rounds under way lie on every GPU"
PEERS = "several GPUs: stages hand over from GPU to GPU, where that is no slower than by way of host memory"
MULTIPLIED = (
    "products of Muon run on the device, one matrix after the other: the STEP of a unit waits for its copies and "
    "products, and the forwards of the unit take as much longer as its products take"
)
ENCODED = "weights go over links as {}, which keeps every bit and is decoded as fast as it arrives"


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Above how many tokens per visit a block computes longer than its weights take to arrive.

    Attributes:
        tokens: in a forward, the smallest stretch of compute that a load can hide behind.
        tokens_per_visit: what a visit of the plan computes.
    """

    tokens: int
    tokens_per_visit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What would happen.

    Attributes:
        decision: that it is of.
        num_gpus: devices that compute.
        microbatches: of a step.
        sequences_per_microbatch: of the largest microbatch.
        round_microbatches: microbatches of a round, of which a step has one or more.
        home: where weights and optimizer state rest.
        memory: bytes by tier and class; the device's are those of each GPU.
        step_s: time of a step among others.
        tokens_per_s: tokens that it trains on, over that.
        interval: where that lies, as far as the share of the peak is known; see `_interval`.
        mfu: FLOPs of forward and backward without recompute, over what the GPUs' data sheets promise in that time.
        bubble: share of the GPUs' time in which they compute nothing.
        free_bubble: the same if copies and the optimizer took no time, by the partitioner's clock: stages fill, drain,
            and wait for each other. None for one GPU.
        stalls: the same by cause, largest first.
        usage: share of a step in which each resource is in use at its full rate, largest first.
        break_even: of a block's weights.
        stages: how several GPUs share the model; None for one.
        activations: by what becomes of it, for how many units and microbatches backwards find what they need.
        products_on: where products of Muon run, ``host`` or ``device``; None of other optimizers.
        assumptions: what was taken for granted.
        tokens: to train on; None where nobody has said.
    """

    decision: Decision = field(repr=False, compare=False)
    num_gpus: int
    microbatches: int
    sequences_per_microbatch: int
    round_microbatches: int
    home: Tier
    memory: Table
    step_s: float
    tokens_per_s: float
    interval: tuple[float, float]
    mfu: float
    bubble: float
    free_bubble: float | None
    stalls: Mapping[str, float]
    usage: Mapping[str, float]
    break_even: BreakEven
    stages: Stages | None
    activations: Mapping[str, int]
    products_on: str | None
    assumptions: tuple[str, ...]
    tokens: float | None = None

    @property
    def plan(self) -> Plan:
        """That was decided on."""
        return self.decision.plan

    @property
    def steps(self) -> int | None:
        """Optimizer steps of `tokens`."""
        return None if self.tokens is None else ceil(self.tokens / round(self.tokens_per_s * self.step_s))

    @property
    def eta_s(self) -> float | None:
        """Seconds of all steps."""
        return None if self.steps is None else self.steps * self.step_s

    @property
    def disk_written_bytes(self) -> int | None:
        """Bytes that all steps write to the disk."""
        return None if self.steps is None else self.steps * self.plan.traffic.disk_written

    @property
    def plan_id(self) -> str:
        """Of the plan, see `Plan.plan_id`."""
        return self.plan.plan_id

    @property
    def program(self) -> str:
        """Text of the program of a step, which `simulate` takes as it is, or changed; of fewer tiles than a run's."""
        return render(self.decision.simulate(every_round=True).programs[0])

    @property
    def timeline(self) -> Timeline:
        """Of all steps simulated."""
        simulated = self.decision.simulated
        return (self.decision.simulate(every_round=True) if simulated.left_out else simulated).done.timeline

    def simulate(self, program: str | Callable[[str], str]) -> Simulation:
        """Return steps of another program over the same memory and machine; see `PlannedStep.simulate_program`."""
        step, times = self.decision.step, self.decision.microbatch.times
        return step.simulate_program(step.costs(self.decision.question.machine, times), program)

    @property
    def binding(self) -> str:
        """The resource that is in use most."""
        return next(iter(self.usage))

    @property
    def ends_it(self) -> str:
        """What ends the step, in one sentence."""
        share = self.usage[self.binding]
        if share >= FULL_SHARE or not self.stalls:
            return f"{self.binding}: in use for {share:.0%} of a step"
        return (
            f"waiting: no resource is in use for more than {share:.0%} of a step ({self.binding}); GPUs wait most "
            f"for {next(iter(self.stalls))}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction in what JSON knows: of its plan the id, and no timeline."""
        fields = {name: getattr(self, name) for name in self.__slots__ if name != "decision"}
        fields["plan_id"] = self.plan_id
        fields["break_even"] = asdict(self.break_even)
        fields["stages"] = None if self.stages is None else asdict(self.stages)
        fields["memory_bytes"] = fields.pop("memory")
        fields |= {name: getattr(self, name) for name in ("steps", "eta_s", "disk_written_bytes")}
        return {**fields, "binding": self.binding, "ends_it": self.ends_it}

    def total_bytes(self, tier: str) -> int:
        """Return all bytes set aside in ``tier``."""
        return sum(self.memory[tier].values())


def fastest(question: Question) -> Prediction:
    """Return what the decision on ``question`` would take.

    Raises:
        ConfigError: what is asked for cannot be.
        InfeasiblePlanError: nothing fits.
    """
    return predict(decide(question))


def predict_again(base: Prediction, question: Question, *, may_gain: bool = True) -> Prediction:
    """Return what the plan of ``base`` would take in ``question``, whose rates are others; of one GPU, or a better.

    Unless that plan ``may_gain`` it is not simulated: ``base`` stands for what it would take.
    """
    one = question.microbatch(base.microbatches)
    same = Decision(question=question, plan=base.plan, microbatch=one)
    again = predict(same) if may_gain else base
    if question.num_workers > 1:
        return again
    other = decide(replace(question, brief=True))
    return (
        min(again, predict(other), key=lambda p: p.step_s)
        if other.lanes.stepped_s < same.lanes.stepped_s
        else again
    )


def predict(decision: Decision) -> Prediction:
    """Return what the simulator says of ``decision``, whose demand was counted."""
    question, plan, simulated = decision.question, decision.plan, decision.simulated
    assert question.workload_of is not None
    sequences = question.sequences_per_microbatch(decision.microbatches)
    work, num_gpus, step_s = question.workload_of(sequences), question.num_workers, simulated.step_s
    available = step_s * sum(
        gpu.peak_flops_per_s[question.model.compute_dtype].value for gpu in question.machine.gpus
    )
    scale = question.sequences * question.seq_len / work.tokens
    usage = _usage(simulated, simulated.busy_s / num_gpus, step_s)
    tokens_per_s = question.tokens_per_step / step_s
    return Prediction(
        decision=decision,
        num_gpus=num_gpus,
        microbatches=decision.microbatches,
        sequences_per_microbatch=sequences,
        round_microbatches=plan.layout.round_size,
        home=plan.home,
        memory=_by_plane(plan),
        step_s=step_s,
        tokens_per_s=tokens_per_s,
        interval=_interval(question, tokens_per_s, usage[COMPUTE]),
        mfu=scale * sum(work.forward_flops + work.gradient_flops) / available,
        bubble=simulated.bubble,
        free_bubble=None if plan.layout.stages is None else decision.free_bubble,
        stalls=_stalls(simulated.steady, simulated.lanes),
        usage=usage,
        break_even=_break_even(decision, work),
        stages=plan.layout.stages,
        activations=_activations(plan.layout),
        products_on=_products_on(decision),
        assumptions=_assumptions(decision),
    )


def _interval(question: Question, tokens_per_s: float, computing: float) -> tuple[float, float]:
    """Return where tokens per second lie: what computes takes as much longer or shorter as its rate is uncertain.

    Beyond that, simulated steps miss measured ones. Rates of links, hosts and disks have no interval yet, or were
    measured; where these end the step it is too narrow.
    """
    rates = [(gpu.efficiency, gpu.fp8_gain) for gpu in question.machine.gpus]
    uncertain = max(sum(figure.within for figure in figures if figure is not None) for figures in rates)
    counted = question.workload_of
    if counted is not None and counted(1).routed_flops:
        uncertain += MIXTURES_WITHIN
    within = uncertain * computing + SIMULATED_WITHIN
    return tokens_per_s * (1 - within), tokens_per_s * (1 + within)


def _products_on(decision: Decision) -> str | None:
    state = decision.plan.state
    return ("device" if state.products_on_device else "host") if state.newton_schulz else None


def _assumptions(decision: Decision) -> tuple[str, ...]:
    codec = decision.chosen.get("weights")
    return (
        *((SEVERAL,) if decision.question.num_workers > 1 else ()),
        *assumptions_of(decision.question),
        *((PEERS,) if decision.plan.layout.peers else ()),
        *((ENCODED.format(codec),) if codec else ()),
        *((MULTIPLIED,) if decision.plan.state.products_on_device else ()),
    )


def _activations(layout: StepLayout) -> dict[str, int]:
    """Return how often each choice was made, the most frequent first."""
    choices = Counter[Choice]()
    for unit in range(layout.first_backward, layout.last):
        choices.update(layout.choices(unit, layout.num_microbatches))
    return {choice.value: count for choice, count in choices.most_common()}


def _by_plane(plan: Plan) -> Table:
    """Return the memory with the home split into weights, master, optimizer state and gradients."""
    return {
        tier: {
            **{name: size for name, size in classes.items() if name != "home"},
            **(plan.home_parts if "home" in classes else {}),
        }
        for tier, classes in plan.memory.items()
    }


def _stalls(steady: Timeline, lanes: list[str]) -> dict[str, float]:
    """Return the share of all GPUs' time spent waiting, by cause, largest first."""
    shares: dict[str, float] = defaultdict(float)
    for waits in waits_by_cause(steady, lanes):
        for cause, stall_s in waits.items():
            shares[cause] += stall_s / (len(lanes) * steady.span_s)
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return {cause: share for cause, share in ordered if share >= LEAST_SHARE}


def _usage(simulated: Simulated, busy_s: float, step_s: float) -> dict[str, float]:
    """Return the share of a step in which each resource is in use, the busiest first.

    Links of a kind count as one, the busiest of them. Resources that nothing goes through are left out.
    """
    shares = {COMPUTE: busy_s / step_s}
    for name, amount in simulated.amounts.items():
        share = amount / simulated.costs.capacity[name] / step_s
        kind = _RESOURCES.get(name.partition(":")[0], name)
        shares[kind] = max(share, shares.get(kind, 0.0))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


LINK_UP = "link to the GPU"
_RESOURCES = {
    "up": LINK_UP,
    "down": "link from the GPU",
    "optimizer": "optimizer on the host",
    "uplink": "switch",
    "peer": "link between GPUs",
}


def _break_even(decision: Decision, work: Workload) -> BreakEven:
    machine, model = decision.question.machine, decision.question.model
    forward_s = decision.microbatch.times.forward_s
    link = min(map(machine.up_bytes_per_s, range(len(machine.gpus))))
    loads_s = [unit.link_bytes(model.dtype) / link for unit in model.units[: model.num_streamed]]
    tokens = max(
        load_s * work.tokens / computed_s
        for load_s, computed_s, unit in zip(loads_s, forward_s, model.units, strict=False)
        if unit.kind == "block"
    )
    return BreakEven(tokens=round(tokens), tokens_per_visit=decision.plan.layout.round_size * work.tokens)


ALWAYS = (
    "a backward takes two forwards, and the recompute before it one",
    "matrix products reach the efficiency above whatever the size of a microbatch",
    "activations and workspace are counted from the config; a run measures them on the model",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFigure:
    """A figure that the prediction used.

    Attributes:
        name: what it is of.
        value: the number, in ``unit``.
        unit: its unit.
        source: where it comes from.
        measured: whether it was measured on the machine at hand.
    """

    name: str
    value: float
    unit: str
    source: str
    measured: bool


def figures_used(question: Question, prediction: Prediction) -> tuple[UsedFigure, ...]:
    """Return the figures of the first GPU, its link and the host; of the disk and copies between GPUs where used."""
    machine, dtype = question.machine, question.model.compute_dtype
    gpu, link, host, disk = machine.gpus[0], machine.links[0], machine.host, machine.disk
    rows = [
        (f"{gpu.name} {dtype} peak", gpu.peak_flops_per_s[dtype], "FLOP/s"),
        ("share of the peak reached", gpu.efficiency, ""),
        (f"{gpu.name} memory bandwidth", gpu.memory_bytes_per_s, "B/s"),
        ("link to the GPU", link.up_bytes_per_s, "B/s"),
        ("link from the GPU", link.down_bytes_per_s, "B/s"),
        ("host memory bandwidth", host.bytes_per_s, "B/s"),
        ("AdamW on the host", host.adamw_params_per_s, "parameters/s"),
    ]
    if gpu.fp8_gain is not None:
        rows.insert(2, ("linear layers of blocks in fp8", gpu.fp8_gain, "times as fast"))
    if question.options.state is not None and question.options.state.newton_schulz:
        on_device = prediction.plan.state.products_on_device
        place, rate = (gpu.name, gpu.products) if on_device else ("the host", host.products)
        rows.append((f"products on {place}, of Muon", rate, "FLOP/s"))
    if prediction.home == "disk" and disk is not None:
        rows += [
            ("disk reads", disk.read_bytes_per_s, "B/s"),
            ("disk writes", disk.write_bytes_per_s, "B/s"),
        ]
    if machine.peers and ARRIVALS in prediction.memory["device"]:
        rows.append(("link between GPUs", machine.peers[0].bytes_per_s, "B/s"))
    return tuple(
        UsedFigure(name=name, value=figure.value, unit=unit, source=figure.source, measured=figure.measured)
        for name, figure, unit in rows
    )
