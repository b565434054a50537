"""Predict how fast a model writes text whose weights rest in host memory or on disk, on one GPU.

A pass visits every unit once and writes one token of each text (`planner.search.forward_plan`). Units that stay on the
GPU are read from its memory; the others come over the link while units before them compute, so a pass takes as long as
the slower of the two. Of a sparse mixture only the experts that the texts of a pass choose come up, on demand, with
nothing to hide them: those take their time beside it. A product of few tokens takes as long as reading its weights.
"""

from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from outsize.errors import InfeasiblePlanError
from outsize.model.sizes.model_spec import UnitSpec
from outsize.planner.memory.memory_table import Tier
from outsize.planner.predict.question import Question
from outsize.planner.search.forward_plan import LEAST_SPARSITY, Scan, plan_scan
from outsize.planner.simulate.gpu_times import unit_times
from outsize.units import format_bytes

# Texts at once beyond which nobody asks for a break-even.
MOST_TEXTS = 2**14
PRODUCTS_ASSUMED = (
    "a product of few tokens takes what reading its weights takes, and nothing is lost between kernels: small models "
    "that stay on the GPU are slower, since launches of eager blocks end their passes"
)
ONE_GPU_ASSUMED = "one GPU of the machine writes; the others are idle"
EXPERTS_ASSUMED = (
    "texts choose experts evenly, and those that stay on the GPU are chosen no more often than others"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Texts to write: how many, how long, and what their keys and values take.

    Attributes:
        count: texts at once.
        prompt_tokens: of each prompt.
        new_tokens: behind each.
        cache_bytes: of keys and values of one text of so many tokens.
        experts: of a layer, and how many of them a token chooses; None of a dense model.
    """

    count: int
    prompt_tokens: int
    new_tokens: int
    cache_bytes: Callable[[int], int]
    experts: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The predicted speed and memory of writing texts.

    Attributes:
        texts: at once.
        home: where weights rest.
        weight_bytes: of all of them, at home.
        units: that the forward visits, and that take memory on the GPU.
        kept_units: of them, those that stay on the GPU.
        bytes_per_pass: that come up for a token of each text, experts included.
        cache_bytes: of keys and values of all texts at their longest.
        cache_on_host: whether these rest in host memory, for want of room on the GPU.
        device_bytes: on the GPU.
        first_token_s: until each text has its first token: weights come up once, and prompts are computed.
        pass_s: of a further token of each text.
        tokens_per_s: of all texts together, while they are written.
        break_even_texts: at once, from which computing takes as long as moving; None where nothing moves.
        break_even_fits: whether their keys and values have room on the GPU.
        expert_bytes: of experts that come up on demand; 0 where none do.
        kept_expert_bytes: of those that stay on the GPU.
        ends_it: what a pass waits for.
        assumptions: what was taken for granted.
    """

    texts: int
    home: Tier
    weight_bytes: int
    units: int
    kept_units: int
    bytes_per_pass: int
    cache_bytes: int
    cache_on_host: bool
    device_bytes: int
    first_token_s: float
    pass_s: float
    tokens_per_s: float
    break_even_texts: int | None
    break_even_fits: bool
    expert_bytes: int
    kept_expert_bytes: int
    ends_it: str
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """Compute, moved bytes and kept units of a pass over all units."""

    scan: Scan
    compute_s: float
    moved_bytes: float
    experts_bytes: float
    cache_on_host: bool
    device_bytes: int
    experts_room: int
    held_bytes: int

    def seconds(self, rate: float) -> float:
        return max(self.compute_s, self.moved_bytes / rate) + self.experts_bytes / rate


def generation(question: Question, texts: Texts) -> Generation:
    """Return what writing ``texts`` would take on the first GPU of the machine.

    Args:
        question: of the model, the machine, and the budgets; its sequences are as long as a prompt.
        texts: that are written.

    Raises:
        InfeasiblePlanError: weights fit neither host memory nor disk, or the largest unit does not fit the GPU.
    """
    writer = _Writer(question, texts)
    one = writer.one_pass(texts.count)
    pass_s = one.seconds(writer.rate)
    moves = one.moved_bytes + one.experts_bytes
    where = "the disk" if writer.home == "disk" and writer.rate < writer.link else "the link to the GPU"
    limit = where if moves / writer.rate >= one.compute_s else "computing, and reading what is on the GPU"
    length = texts.prompt_tokens + texts.new_tokens
    even = writer.break_even(one) if moves else None
    return Generation(
        texts=texts.count,
        home=writer.home,
        weight_bytes=writer.weight_bytes,
        units=len(one.scan.kept) + len(one.scan.streamed),
        kept_units=len(one.scan.kept),
        bytes_per_pass=round(moves),
        cache_bytes=texts.count * texts.cache_bytes(length),
        cache_on_host=one.cache_on_host,
        device_bytes=one.device_bytes,
        first_token_s=max(writer.prompt_s(), writer.weight_bytes / writer.rate),
        pass_s=pass_s,
        tokens_per_s=texts.count / pass_s,
        break_even_texts=even,
        break_even_fits=even is not None and writer.has_room_for(even),
        expert_bytes=writer.expert_bytes,
        kept_expert_bytes=one.held_bytes,
        ends_it=limit,
        assumptions=(
            PRODUCTS_ASSUMED,
            *((ONE_GPU_ASSUMED,) if len(question.machine.gpus) > 1 else ()),
            *((EXPERTS_ASSUMED,) if writer.expert_bytes else ()),
        ),
    )


class _Writer:
    """The figures that passes of any number of texts share."""

    def __init__(self, question: Question, texts: Texts) -> None:
        assert question.workload_of is not None
        self._question, self._texts = question, texts
        model, machine, dtype = question.model, question.machine, question.model.dtype
        self._work_of = question.workload_of
        self._gpu = machine.gpus[0]
        self._flops_per_s = self._gpu.flops_per_s(model.compute_dtype)
        self._units = model.units[: model.num_streamed]
        self.weight_bytes = sum(unit.link_bytes(dtype) for unit in model.units)
        self.home = self._home()
        self.link = machine.up_bytes_per_s(0)
        self.rate = self.link
        if self.home == "disk" and machine.disk is not None:
            self.rate = min(self.link, machine.disk.read_bytes_per_s.value)
        apart = texts.experts is not None and texts.experts[0] >= LEAST_SPARSITY * texts.experts[1]
        self._expert_bytes = [_expert_bytes(unit, dtype) if apart else 0 for unit in self._units]
        self.expert_bytes = sum(self._expert_bytes)
        # Of an embedding only rows come up.
        self._scanned = [
            0 if unit.kind == "embedding" else unit.weight_bytes(dtype) - expert_bytes
            for unit, expert_bytes in zip(self._units, self._expert_bytes, strict=True)
        ]
        self._rest_bytes = sum(unit.weight_bytes(dtype) for unit in model.units[model.num_streamed :])

    def _home(self) -> Tier:
        """Return where weights rest."""
        budgets, wanted = self._question.budgets, self._question.home
        for home, budget in (("host", budgets.host), ("disk", budgets.disk)):
            there = home == "host" or self._question.machine.disk is not None
            if (
                there
                and wanted in ("auto", home)
                and self.weight_bytes <= (inf if budget is None else budget)
            ):
                return "host" if home == "host" else "disk"
        raise InfeasiblePlanError(
            f"weights of {format_bytes(self.weight_bytes)} fit neither the host's memory nor a disk; give more with "
            "--ram or --disk, or name a --base-codec with --method lora",
            {"host": self.weight_bytes - (budgets.host or 0)},
        )

    def prompt_s(self) -> float:
        """Return what computing all prompts takes; heads only see the last token of each."""
        texts = self._texts
        work = self._work_of(1)
        forward_s = unit_times(self._question.machine, self._question.model.compute_dtype, work).forward_s
        return texts.count * (sum(forward_s[:-1]) + forward_s[-1] / work.tokens)

    def one_pass(self, count: int) -> _Pass:
        """Return a pass that writes a token of each of ``count`` texts, half of which are there.

        Raises:
            InfeasiblePlanError: the largest unit does not fit beside them.
        """
        question = self._question
        cache, mean = self._caches(count)
        beside = question.fixed_bytes + self._rest_bytes
        beside += max(self._work_of(count).forward_workspace_bytes.values())
        room, hosted = question.budgets.device - beside, False
        try:
            scan = plan_scan(self._scanned, room - cache)
        except InfeasiblePlanError:
            cache_above, hosted = 2 * cache // len(self._units), True
            scan = plan_scan(self._scanned, room - cache_above)
            cache = cache_above
        moved = sum(self._link_bytes(unit) for unit in scan.streamed) + mean * hosted
        left = room - cache - scan.device_bytes
        used, missing, held = self._experts(count, left)
        return _Pass(
            scan=scan,
            compute_s=self._compute_s(count, used, mean),
            moved_bytes=moved,
            experts_bytes=missing,
            cache_on_host=hosted,
            device_bytes=beside + cache + scan.device_bytes + held,
            experts_room=left,
            held_bytes=held,
        )

    def _caches(self, count: int) -> tuple[int, int]:
        """Return the bytes of keys and values of texts: at their longest, and with half of their new tokens."""
        texts = self._texts
        length = texts.prompt_tokens + texts.new_tokens
        return count * texts.cache_bytes(length), count * texts.cache_bytes(length - texts.new_tokens // 2)

    def _link_bytes(self, unit: int) -> int:
        return self._units[unit].link_bytes(self._question.model.dtype) - self._expert_bytes[unit]

    def _experts(self, count: int, room: int) -> tuple[list[float], float, int]:
        """Return the bytes of experts that a pass uses of each unit, all that come up of them, and all that stay."""
        every = self.expert_bytes
        if not every or self._texts.experts is None:
            return [0.0] * len(self._units), 0.0, 0
        number, chosen = self._texts.experts
        share = 1 - (1 - chosen / number) ** count
        used = [share * expert_bytes for expert_bytes in self._expert_bytes]
        held = max(0, min(room, every))
        return used, sum(used) * (1 - held / every), held

    def _compute_s(self, count: int, experts: list[float], cache: float) -> float:
        """Return what units take: their products, or reading their weights and the texts' keys and values."""
        work, memory = self._work_of(1), self._gpu.memory_bytes_per_s.value
        seconds = cache / memory
        for flops, dense, chosen in zip(work.forward_flops, self._scanned, experts, strict=True):
            seconds += max(count * flops / work.tokens / self._flops_per_s, (dense + chosen) / memory)
        return seconds

    def break_even(self, one: _Pass) -> int | None:
        """Return the fewest texts of which computing takes as long as moving what ``one`` does; None of too many."""

        def hides(count: int) -> bool:
            used, missing, _ = self._experts(count, one.experts_room)
            return (
                self._compute_s(count, used, self._caches(count)[1])
                >= (one.moved_bytes + missing) / self.rate
            )

        counts = range(1, MOST_TEXTS + 1)
        fewest = 1 + bisect_left(counts, True, key=hides)
        return fewest if fewest <= MOST_TEXTS else None

    def has_room_for(self, count: int) -> bool:
        """Whether keys and values of so many texts have room on the GPU."""
        with suppress(InfeasiblePlanError):
            return not self.one_pass(count).cache_on_host
        return False


def _expert_bytes(unit: UnitSpec, dtype: str) -> int:
    """Return the bytes of the experts of a unit on the GPU."""
    share = sum(t.numel for t in unit.all_tensors if ".experts." in t.name) / max(
        1, sum(t.numel for t in unit.all_tensors)
    )
    return round(share * unit.link_bytes(dtype))
