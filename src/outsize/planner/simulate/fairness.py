"""How flows share bandwidths: max-min fair, by progressive filling.

All flows grow alike until a resource that some of them use is full; those keep their rate, the others grow on.
No flow can then be given more without taking from one that has no more than it.
"""

from collections.abc import Mapping, Sequence
from math import inf


def fair_rates(flows: Sequence[tuple[str, ...]], capacity: Mapping[str, float]) -> list[float]:
    """Return the rate of each flow.

    Args:
        flows: the resources that each flow goes through; at least one, none twice.
        capacity: what each resource can carry, in the unit of the rates.
    """
    users: dict[str, list[int]] = {}
    for index, resources in enumerate(flows):
        for name in resources:
            users.setdefault(name, []).append(index)
    # What nobody else uses bounds a flow; often that leaves room in all that is shared.
    rates = [
        min([capacity[name] for name in resources if len(users[name]) == 1], default=inf)
        for resources in flows
    ]
    if all(
        len(indices) == 1 or sum([rates[index] for index in indices]) <= capacity[name]
        for name, indices in users.items()
    ):
        return rates
    left = {name: capacity[name] for name in users}
    open_users = {name: len(indices) for name, indices in users.items()}
    growing = set(range(len(flows)))
    while growing:
        share, full = min((left[name] / open_users[name], name) for name in users if open_users[name])
        for index in users[full]:
            if index in growing:
                growing.discard(index)
                rates[index] = share
                for name in flows[index]:
                    left[name] = max(0.0, left[name] - share)
                    open_users[name] -= 1
    return rates
