"""What is wrong with the variables of NCCL that a machine has set; what they are is in `outsize.hardware.nccl`."""

from outsize.doctor.facts import Facts, LackingError, fit_of
from outsize.doctor.finding import Seen
from outsize.hardware.nccl import misspelt_variables, overriding_variables
from outsize.units import format_rate

# Of the slowest link of the GPUs; a ring over PCIe that goes by way of host memory reaches about half of it.
_SOUND_SHARE = 0.4


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


def slow_sums(facts: Facts) -> Seen | None:
    """Sums over GPUs reach far less on each link than copies do: NCCL goes by way of sockets, or of another node."""
    machine = facts.machine
    if len(machine.inventory.gpus) < 2:
        return None
    sums = machine.all_reduce
    if sums is None or sums.fit is None or sums.backend != "nccl":
        raise LackingError("sums over the GPUs: outsize all-reduce --output machine.json")
    fits = [fit for device in machine.devices if (fit := fit_of(device, "pinned", "down")) is not None]
    if not fits:
        raise LackingError("copies of the GPUs: outsize probe --output machine.json")
    link_bytes_per_s = min(fit.bytes_per_s for fit in fits)
    if sums.fit.bytes_per_s >= _SOUND_SHARE * link_bytes_per_s:
        return None
    return Seen(
        severity="warning",
        evidence=(
            f"sums over {sums.num_ranks} GPUs: {format_rate(sums.fit.bytes_per_s)} on each link, where copies reach "
            f"{format_rate(link_bytes_per_s)}"
        ),
        expected=f"{_SOUND_SHARE:.0%} of what copies reach, or more",
        gain_share=1 - sums.fit.bytes_per_s / (_SOUND_SHARE * link_bytes_per_s),
    )


def _variables(facts: Facts) -> dict[str, str]:
    found = facts.machine.inventory.environment.variables
    return {name: str(fact.value) for name, fact in found.items()}
