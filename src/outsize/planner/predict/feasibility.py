"""Whether anything fits at all, and what keeps a home out of host memory."""

from outsize.codecs.codec_spec import LOSSLESS3
from outsize.codecs.transport import Transport
from outsize.errors import InfeasiblePlanError
from outsize.planner.memory.memory_table import Tier
from outsize.planner.predict.decision_search import planned_at, tiers_of
from outsize.planner.predict.question import Question
from outsize.planner.search.plan_stages import fits_stages
from outsize.planner.search.step_plan import shortage_of


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


def host_refusal(question: Question, microbatches: int) -> InfeasiblePlanError | None:
    """Return why the home is not in host memory, with what to try; None where it fits there."""
    try:
        planned_at(question, microbatches, "host")
    except InfeasiblePlanError as error:
        return error
    return None


def missing_host_bytes(question: Question, microbatches: int) -> int:
    """Return how much host memory is lacking to have the home there; 0 where none is, or something else is."""
    refusal = host_refusal(question, microbatches)
    return 0 if refusal is None else refusal.short_by.get("host", 0)
