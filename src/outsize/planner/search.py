"""The fastest predicted step: over numbers of microbatches and homes.

Compute is taken to be as fast on small microbatches as on large ones, which flatters the small ones. So the search
goes from the largest microbatch that fits to smaller ones, and ends where one gains less than a percent, or where less
than a percent is left to gain.
"""

from collections.abc import Iterator

from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.planner.candidate import Candidate
from outsize.planner.memory import Tier
from outsize.planner.one_worker import one_worker
from outsize.planner.prediction import Prediction, predict
from outsize.planner.question import Question
from outsize.planner.several_workers import several_workers

# Sequences per microbatch that are tried.
SIZES = (1, 2, 4, 8, 16)
NEAR = 1.01
# With several GPUs each number of microbatches takes a search for stages, so one is tried. It gives each GPU four:
# with fewer the filling and draining of stages shows. And its microbatches are no larger than what fills a GPU: on
# 4 x 2,048 tokens layers run at their rate (the published layer times of bench/bench_bubble.py).
PER_GPU, FULL_TOKENS = 4, 8192


def fastest(question: Question) -> Prediction:
    """Return the prediction of the fastest step found.

    Raises:
        ConfigError: what is asked for cannot be.
        InfeasiblePlanError: nothing fits; of the plan that is short by the least.
    """
    best: Prediction | None = None
    failures: list[InfeasiblePlanError] = []
    for microbatches in _choices(question):
        try:
            prediction = predict(question, _candidate(question, microbatches))
        except InfeasiblePlanError as error:
            failures.append(error)
            continue
        if best is not None and prediction.step_s * NEAR >= best.step_s:
            break
        best = prediction
        if best.bubble <= 1 - 1 / NEAR:
            break
    if best is None:
        raise min(failures, key=lambda error: sum(error.short_by.values()))
    return best


def _choices(question: Question) -> Iterator[int]:
    """Yield numbers of microbatches, the largest microbatches first."""
    if question.microbatches is not None:
        yield question.microbatches
        return
    sizes = [size for size in SIZES if question.sequences % size == 0]
    counts = [question.sequences // size for size in reversed(sizes)]
    num_gpus = len(question.machine.gpus)
    if num_gpus == 1:
        yield from counts
        return
    most = max(1, FULL_TOKENS // question.seq_len)
    enough = [count for count in counts if count >= PER_GPU * num_gpus and question.sequences <= most * count]
    yield enough[0] if enough else counts[-1]


def _candidate(question: Question, microbatches: int) -> Candidate:
    """Return the candidate with the home that was asked for, or the first that fits."""
    if len(question.machine.gpus) > 1:
        return several_workers(question, microbatches)
    homes: dict[str, tuple[Tier, ...]] = {"host": ("host",), "disk": ("disk",), "auto": ("host", "disk")}
    if question.home == "disk" and question.machine.disk is None:
        raise ConfigError(f"{question.machine.name} has no disk to keep anything on")
    tiers = homes[question.home] if question.machine.disk is not None else ("host",)
    for tier in tiers[:-1]:
        try:
            return one_worker(question, microbatches, tier)
        except InfeasiblePlanError as error:
            if "host" not in error.short_by:
                raise
    return one_worker(question, microbatches, tiers[-1])


def fits_at_all(question: Question) -> bool:
    """Return whether anything fits with the microbatches that ``question`` names; nothing is simulated."""
    assert question.microbatches is not None
    try:
        _candidate(question, question.microbatches)
    except InfeasiblePlanError:
        return False
    return True


def missing_host_bytes(question: Question, microbatches: int) -> int:
    """Return how much host memory one GPU lacks to have the home there; 0 where it lacks none, or something else."""
    try:
        one_worker(question, microbatches, "host")
    except InfeasiblePlanError as error:
        return error.short_by.get("host", 0)
    return 0
