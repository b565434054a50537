"""Whether anything fits, and where the home may be: nothing is simulated."""

from outsize.codecs.codec_spec import LOSSLESS3
from outsize.codecs.transport import Transport
from outsize.errors import ConfigError
from outsize.planner.memory.memory_table import Tier
from outsize.planner.predict.question import Question
from outsize.planner.search.plan_stages import fits_stages
from outsize.planner.search.step_plan import shortage_of


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
