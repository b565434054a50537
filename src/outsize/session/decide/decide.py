"""The decision of a run: what it computes and moves, found once, by the same call wherever a run is told or begun.

`outsize train`, its dry run and `outsize verify` prepare a run and call `decide`; nothing else chooses.
"""

from collections.abc import Callable
from pathlib import Path

from outsize.session.decide.activation_choice import choose_activations
from outsize.session.decide.codec_choice import choose_codec
from outsize.session.decide.rates import Rates
from outsize.session.job.prepare import Prepared


def decide(
    prepared: Prepared, run_dir: Path, announce: Callable[[str], None]
) -> tuple[Prepared, Rates | None]:
    """Return the run with the plan that it follows, and the rates that the plan was found with.

    Args:
        prepared: a run, as `prepare` returns it.
        run_dir: directory of the run, which may hold rates.
        announce: told what was chosen and why.

    Returns:
        The run, and rates; None where nothing depended on rates.
    """
    prepared, rates = choose_codec(prepared, run_dir, announce)
    return choose_activations(prepared, run_dir, announce, rates)
