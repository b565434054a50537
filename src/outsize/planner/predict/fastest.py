"""The fastest predicted step: over numbers of microbatches and homes.

Microbatches are searched by `microbatches.search_cuts`, which ends early where less than a percent is left to gain:
GPUs neither wait nor recompute, for which smaller microbatches may leave room.

Several GPUs are searched for stages, which takes a second. Smaller microbatches shorten the time in which the first of
them reaches all GPUs, and the last leaves them. That is known before anything is searched; where it leaves a percent to
gain, the partitioner is asked for a moment, by its own clock, and only what it finds faster is simulated.
"""

from dataclasses import replace

from outsize.codecs.codec_spec import LOSSLESS3, LOSSLESS4
from outsize.codecs.transport import Transport
from outsize.errors import ConfigError, InfeasiblePlanError
from outsize.planner.memory.link_bytes import packed_bytes
from outsize.planner.memory.memory_table import Tier
from outsize.planner.predict.candidate import Candidate
from outsize.planner.predict.codec_gain import worth_it
from outsize.planner.predict.one_worker import fits_one_worker, one_worker
from outsize.planner.predict.prediction import Prediction, predict
from outsize.planner.predict.question import Question
from outsize.planner.predict.several_workers import (
    estimate_s,
    filling_and_draining_s,
    fits_several_workers,
    several_workers,
    with_peers,
)
from outsize.planner.search.microbatch_search import NEAR, may_shorten, search_cuts, simulated_cuts

ENCODED = "weights go over links as {}, which keeps every bit and is decoded as fast as it arrives"


def fastest(question: Question) -> Prediction:
    """Return the prediction of the fastest step found.

    Raises:
        ConfigError: what is asked for cannot be.
        InfeasiblePlanError: nothing fits; of the plan that is short by the least.
    """
    num_gpus, named = len(question.machine.gpus), question.microbatches
    several = num_gpus > 1
    cuts = simulated_cuts(question.sequences, question.seq_len, num_gpus)

    def take(microbatches: int) -> Prediction:
        return _predicted(question, _candidate(question, microbatches))

    def is_enough(best: Prediction) -> bool:
        return best.bubble <= 1 - 1 / NEAR and (several or best.recomputed <= 1 - 1 / NEAR)

    return search_cuts(
        cuts if named is None else (named,),
        take,
        lambda prediction: prediction.step_s,
        may_gain=lambda best, microbatches: not several or _may_gain(question, best, microbatches),
        is_enough=is_enough,
    )


def fastest_with_codecs(question: Question) -> tuple[Question, Prediction]:
    """Return ``question``, with a codec that keeps every bit of the weights where one is worth it, and its `fastest`.

    Raises:
        ConfigError: what is asked for cannot be.
        InfeasiblePlanError: nothing fits.
    """
    best: Prediction | None = None
    failure: InfeasiblePlanError | None = None
    encoded = question
    try:
        best = fastest(question)
    except InfeasiblePlanError as error:
        failure = error
    for spec in (LOSSLESS4, LOSSLESS3):
        candidate = replace(question, transport=Transport(weights=spec.name))
        if best is not None and best.home == "host":
            if question.nodes > 1:  # which encode no more than it takes to have the home there
                break
            asked = replace(candidate, microbatches=best.microbatches)
        elif question.home != "disk" and packed_bytes(candidate.transport, question.model):
            asked = candidate  # what does not train rests encoded, and may fit host memory so
        else:
            break
        try:
            found = fastest(asked)
        except InfeasiblePlanError:
            continue
        if best is None or worth_it(best.step_s, found.step_s):
            best = replace(found, assumptions=(*found.assumptions, ENCODED.format(spec.name)))
            encoded = candidate
    if best is None:
        assert failure is not None
        raise failure
    return encoded, best


def _predicted(question: Question, candidate: Candidate) -> Prediction:
    """Return the prediction of ``candidate``, handing over from GPU to GPU where that can be and is not slower."""
    prediction = predict(question, candidate)
    other = with_peers(question, candidate) if candidate.layout.stages is not None else None
    if other is None:
        return prediction
    direct = predict(question, other)
    return direct if direct.step_s <= prediction.step_s else prediction


def _may_gain(question: Question, best: Prediction, microbatches: int) -> bool:
    """Return whether stages of several GPUs could take a percent less with more microbatches than ``best``."""
    assert best.stages is not None
    filling_s = filling_and_draining_s(question, best.microbatches, best.stages, best.home)
    if not may_shorten(filling_s, best.step_s, best.microbatches, microbatches):
        return False
    before_s = estimate_s(question, best.microbatches, best.stages, best.home)
    try:
        gained_s = before_s - estimate_s(question, microbatches, None, best.home)
    except InfeasiblePlanError:
        return False
    return gained_s >= best.step_s * (1 - 1 / NEAR)


def _candidate(question: Question, microbatches: int) -> Candidate:
    """Return the candidate with the home that was asked for, or the first that fits."""
    make = several_workers if len(question.machine.gpus) > 1 else one_worker
    tiers = _tiers(question)
    for tier in tiers[:-1]:
        try:
            return make(question, microbatches, tier)
        except InfeasiblePlanError as error:
            if "host" not in error.short_by:
                raise
    return make(question, microbatches, tiers[-1])


def _tiers(question: Question) -> tuple[Tier, ...]:
    """Return where the home may be, the fastest first."""
    homes: dict[str, tuple[Tier, ...]] = {"host": ("host",), "disk": ("disk",), "auto": ("host", "disk")}
    if question.home == "disk" and question.machine.disk is None:
        raise ConfigError(f"{question.machine.name} has no disk to keep anything on")
    return homes[question.home] if question.machine.disk is not None else ("host",)


def fits_at_all(question: Question) -> bool:
    """Return whether anything fits with the microbatches that ``question`` names; nothing is simulated."""
    assert question.microbatches is not None
    fits = fits_several_workers if len(question.machine.gpus) > 1 else fits_one_worker
    return any(fits(question, question.microbatches, tier) for tier in _tiers(question))


def fits_encoded(question: Question) -> bool:
    """Return whether anything fits with weights as the codec that takes the fewest bytes writes them."""
    return fits_at_all(replace(question, transport=Transport(weights=LOSSLESS3.name)))


def missing_host_bytes(question: Question, microbatches: int) -> int:
    """Return how much host memory is lacking to have the home there; 0 where none is, or something else is."""
    refusal = host_refusal(question, microbatches)
    return 0 if refusal is None else refusal.short_by.get("host", 0)


def host_refusal(question: Question, microbatches: int) -> InfeasiblePlanError | None:
    """Return why the home is not in host memory, with what to try; None where it fits there."""
    make = several_workers if len(question.machine.gpus) > 1 else one_worker
    try:
        make(question, microbatches, "host")
    except InfeasiblePlanError as error:
        return error
    return None
