"""What is wrong with the variables of NCCL that a machine has set; what they are is in `outsize.hardware.nccl`."""

from outsize.doctor.facts import Facts
from outsize.doctor.finding import Seen
from outsize.hardware.nccl import misspelt_variables, overriding_variables


def overridden(facts: Facts) -> Seen | None:
    """A variable that switches a path off or fixes a choice of NCCL."""
    told = overriding_variables(_variables(facts))
    if not told:
        return None
    return Seen(evidence="; ".join(told), expected="NCCL's own choice by what it finds")


def misspelt(facts: Facts) -> Seen | None:
    """A variable that looks like one of NCCL's and is none: it has no effect."""
    told = misspelt_variables(_variables(facts))
    if not told:
        return None
    return Seen(evidence="; ".join(told), expected="names that NCCL reads")


def _variables(facts: Facts) -> dict[str, str]:
    found = facts.machine.inventory.environment.variables
    return {name: str(fact.value) for name, fact in found.items()}
