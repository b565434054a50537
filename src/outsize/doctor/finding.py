"""Define the doctor's rules, observations, findings, advice and remedies.

Each function returns a step of a fix with the numbers of the run, or None where it is not to be had: one microbatch
cannot be made fewer, a home in host memory not moved there. Where the record does not tell, an advice that may be
impossible is not given. A rule with such a step has another one that is always possible.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Literal

from outsize.doctor.run_record import Facts, is_on_cpu
from outsize.hardware.host_memory import pin_limits
from outsize.units import format_seconds


@dataclass(frozen=True, slots=True)
class Remedy:
    """A step of a fix that a setting is.

    Attributes:
        words: for people.
        setting: ``section.key=value``, as `outsize doctor --try` tries it; of several with a space between.
        is_same_training: whether the run with it computes the same step, except for the order of sums.
    """

    words: str
    setting: str
    is_same_training: bool = True


Advice = Callable[[Facts], str | Remedy | None]
MOST_LOADERS: Final = (
    16  # threads; where they have the interpreter wait for one another, more of them help no one
)


def more_tokens(facts: Facts) -> str | Remedy:
    """Twice the tokens per step, in as many more microbatches: what waits is paid once per step."""
    tokens, count = _of(facts, "train", "tokens_per_step"), _microbatches(facts)
    to = f": {2 * tokens} instead of {tokens}" if tokens else " twice as large"
    more = f"{{train.microbatches}}: {2 * count} instead of {count}" if count else "{train.microbatches} more"
    words = f"{TOKENS_PER_STEP}{to} ({more} where memory is short): what waits is paid once per step"
    return Remedy(words, f"train.tokens_per_step={2 * tokens}", is_same_training=False) if tokens else words


def fewer_microbatches(facts: Facts) -> Remedy | None:
    """Half the microbatches of as many tokens; with several workers each needs its own."""
    count = _microbatches(facts)
    if count is None or count < 2 or _num_workers(facts) > 1:
        return None
    words = f"{{train.microbatches}}: {count // 2} instead of {count}, as far as memory allows"
    return Remedy(words, f"train.microbatches={count // 2}")


def more_loaders(facts: Facts) -> Remedy | None:
    """As many threads that make batches as hide behind the rest of a step, by what both took in this run."""
    run = facts.recorded
    waited = 0.0 if run is None else run.waits().get("data", 0.0)
    if run is None or not waited or is_wrapped(facts):
        return None
    workers, ahead = _of(facts, "data", "workers") or 1, _of(facts, "data", "prefetch") or 2
    workers = min(workers, ahead)
    step_s = run.mean("seconds")
    rest_s = step_s * (1 - waited)
    needed = min(math.ceil(workers * step_s / rest_s), MOST_LOADERS) if rest_s > 0 else MOST_LOADERS
    if needed <= workers:
        return None
    words = (
        f"data.workers: {needed} instead of {workers}, with data.prefetch: {max(ahead, needed + 1)}: a batch takes "
        f"{format_seconds(workers * step_s)} to make, and the rest of a step {format_seconds(rest_s)}"
    )
    return Remedy(words, f"data.workers={needed} data.prefetch={max(ahead, needed + 1)}")


def lossless_weights(facts: Facts) -> Remedy | None:
    """Weights in fewer bytes that lose nothing; `auto` that has come to raw has been tried by the run itself."""
    run = facts.recorded
    if run is None or is_on_cpu_alone(facts) or run.plan.get("home") != "host":
        return None
    sent = (run.plan.get("transport", {}).get("weights"), _of(facts, "transport", "weights"))
    if sent != ("raw", "raw") or num_ranks(facts) > 1:
        return None
    words = "transport.weights: auto sends weights in fewer bytes, bit for bit the same, where that shortens a step"
    return Remedy(words, "transport.weights=auto")


def home_in_host_memory(facts: Facts) -> Remedy | None:
    """The home in RAM, where the machine of the run has as much as the state takes."""
    if facts.recorded is None or facts.recorded.plan.get("home") != "disk":
        return None
    state_bytes = sum(facts.recorded.plan.get("home_bytes", {}).values())
    about = facts.recorded.inventory
    usable = None if about is None else about.memory.usable_bytes()
    if not state_bytes or usable is None or state_bytes > usable:
        return None
    return Remedy(
        "{memory.home}: host, which this machine's RAM could hold if it were free", "memory.home=host"
    )


def raised_pin_limits(facts: Facts) -> str | None:
    """What raises the limits of pinned memory that the machine has."""
    about = facts.inventory
    return "; ".join(limit.remedy for limit in pin_limits(about.memory, about.environment)) or None


def home_on_disk(facts: Facts) -> Remedy | None:
    """The home on disk, which reads in order what swap reads page by page."""
    if facts.recorded is not None and facts.recorded.plan.get("home") == "disk":
        return None
    return Remedy(
        "{memory.home}: disk, which reads in order what swap reads page by page", "memory.home=disk"
    )


def smaller_host_budget(facts: Facts) -> str | None:
    """Less host memory for what the run keeps there; a home in it is as large as it is."""
    if facts.recorded is not None and facts.recorded.plan.get("home") == "host":
        return None
    return "a smaller {memory.host_memory}"


def faster_store(facts: Facts) -> str | None:
    """Another disk for the home."""
    if facts.recorded is None or facts.recorded.plan.get("home") != "disk":
        return None
    return "{memory.store_dir} on a faster disk"


def more_device_memory(facts: Facts) -> str | None:
    """A larger budget of the device, where one was set below what there is."""
    if not _of(facts, "memory", "device_memory"):
        return None
    return "a larger {memory.device_memory}, as far as the device has more, so that loads run further ahead"


def further_ahead(facts: Facts) -> Remedy | None:
    """More loads on the way, where fewer than two are."""
    depth = None if facts.recorded is None else facts.recorded.plan.get("prefetch_depth")
    if depth is None or depth > 1:
        return None
    return Remedy(
        "{memory.prefetch}: 2, so that loads are on the way while compute works", "memory.prefetch=2"
    )


def fewer_workers(facts: Facts) -> str | None:
    """Fewer emulated devices or GPUs, where there are several."""
    return "fewer workers where units are few" if _num_workers(facts) > 1 else None


def rarer_checkpoints(facts: Facts) -> str | None:
    """More time between checkpoints, by the key that makes them due."""
    for key in ("save_every", "save_minutes"):
        if _of(facts, "train", key):
            return f"train.{key} larger than {_of(facts, 'train', key):g}"
    return None


def less_recomputation(facts: Facts) -> str | None:
    """More of the device for what backwards need, where they compute it again and the budget is one that was set."""
    policy = () if facts.recorded is None else facts.recorded.plan.get("activations", ())
    if not any("recompute" in choices for choices in policy) or not _of(facts, "memory", "device_memory"):
        return None
    return "less recomputation: a larger {memory.device_memory}, as far as the device has more"


def fewer_threads(facts: Facts) -> str | None:
    """As many threads as the quota has cores, where there are more."""
    granted = facts.inventory.cpu.quota_cores.number()
    threads = None if facts.recorded is None else facts.recorded.about.get("num_threads")
    if granted is None or (threads is not None and threads <= max(1, int(granted))):
        return None
    return f"OMP_NUM_THREADS={max(1, int(granted))}, so that threads do not use the quota up and stand still together"


def smaller_pools(facts: Facts) -> str | None:
    """Fewer threads, where there are several: each of a library's has memory of its own."""
    threads = None if facts.recorded is None else facts.recorded.about.get("num_threads")
    return None if threads == 1 else "fewer threads (OMP_NUM_THREADS), each of which has memory of its own"


def native_kernels(facts: Facts) -> str:
    """The kernels switched on again, or built."""
    if "OUTSIZE_NATIVE" in facts.inventory.environment.native.source:
        return "unset OUTSIZE_NATIVE"
    return (
        "a C compiler (apt install gcc), then in outsize's source: pip install --force-reinstall --no-deps ."
    )


def compressed_exchange(facts: Facts) -> str | None:
    """Gradients between ranks in 8 bits, where they travel whole."""
    sent = _of(facts, "parallel", "gradients") or "fp32"
    words = "parallel.gradients: int8, a quarter of the bytes, which rounds them"
    return words if sent == "fp32" and not is_wrapped(facts) else None


def num_ranks(facts: Facts) -> int:
    """Return the processes that share a step."""
    return 1 if facts.recorded is None else int(facts.recorded.about.get("num_ranks", 1))


def is_wrapped(facts: Facts) -> bool:
    """Whether the run is a loop of the user's own over `outsize.wrap`, which has arguments and no configuration."""
    return facts.recorded is not None and bool(facts.recorded.about.get("wrapped"))


# Words of causes, fixes and remedies name a setting in braces: of ``{key|words}`` a loop of the user's own has the
# words, and ``{section.key}`` is an argument of `outsize.wrap` there.
TOKENS_PER_STEP: Final = (
    "{train.tokens_per_step|tokens per step (a larger batch, or more backwards before optimizer.step())}"
)


def in_words_of(facts: Facts, words: str) -> str:
    """Return ``words`` with settings named as their user says them: keys, or arguments and parts of a loop."""

    def name(match: re.Match[str]) -> str:
        key, _, instead = match[1].partition("|")
        return (instead or f"{key.partition('.')[2]} of outsize.wrap") if is_wrapped(facts) else key

    return re.sub(r"\{([^{}]+)\}", name, words)


def is_on_cpu_alone(facts: Facts) -> bool:
    """Whether units compute where host memory is; an emulated device has a link."""
    return (
        facts.recorded is not None and is_on_cpu(facts) and not facts.recorded.device.startswith("emulated")
    )


def _of(facts: Facts, section: str, key: str) -> Any:
    return None if facts.recorded is None else facts.recorded.config.get(section, {}).get(key)


def _microbatches(facts: Facts) -> int | None:
    planned = None if facts.recorded is None else facts.recorded.plan.get("microbatches")
    count: int | None = planned or _of(facts, "train", "microbatches")
    return count


def _num_workers(facts: Facts) -> int:
    return 1 if facts.recorded is None else int(facts.recorded.plan.get("workers") or 1)


Severity = Literal["error", "warning", "info", "good"]
SEVERITIES: Final[tuple[Severity, ...]] = ("error", "warning", "info", "good")
# What a gain is a share of: the time that a step spends there. ``run`` is the whole step.
Part = Literal["link", "disk", "host", "compute", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the function of a rule saw.

    Attributes:
        evidence: what was recorded, with its numbers.
        expected: what it should be instead.
        severity: ``error``: does not work as it should; ``warning``: costs time or puts a run at risk; ``info``: worth
            knowing; ``good``: as it should be.
        gain_share: share of the time of the rule's part, 0 to 1, that the fix is expected to save; None where only a
            trial can tell.
    """

    evidence: str
    expected: str
    severity: Severity = "warning"
    gain_share: float | None = None


def worst(observations: Iterable[Seen]) -> Seen | None:
    """Return the one with the largest gain, the first of equal ones; None of none."""
    return max(observations, key=lambda one: one.gain_share or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table.

    Attributes:
        id: by which a finding is known.
        part: what it slows down.
        look: returns what it sees in the facts, None where nothing is wrong; raises `LackingError` where the record
            does not hold what it needs.
        causes: the likely ones, the likeliest first.
        fix: a command, a line of the configuration, or what to change; of several, those that are possible are told.
        verify: how to see that it helped.
        limits: what limits a run of which this is found, in words; empty for what is never said to.
    """

    id: str
    part: Part
    look: Callable[[Facts], Seen | None]
    causes: tuple[str, ...]
    fix: tuple[str | Remedy | Advice, ...] | str
    verify: str
    limits: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found, ready to be told.

    Attributes:
        id: of the rule.
        part: what it slows down.
        severity: how bad.
        evidence: what was recorded.
        expected: what it should be.
        causes: the likely ones, in order.
        fix: what to do.
        remedies: what of it settings do.
        gain: what that is expected to bring, in words.
        gain_share: the same as a share, 0 to 1, of a step where a run is known, else of the time of the part; None
            where only a trial can tell.
        verify: how to see that it helped.
        limits: what a run is limited by where this is its verdict, see `Rule`.
    """

    id: str
    part: Part
    severity: Severity
    evidence: str
    expected: str
    causes: tuple[str, ...]
    fix: str
    remedies: tuple[Remedy, ...] = ()
    gain: str
    gain_share: float | None
    verify: str
    limits: str = ""
