"""How flows share bandwidths: max-min fair, by progressive filling.

All flows grow alike until a resource that some of them use is full; those keep their rate, the others grow on.
No flow can then be given more without taking from one that has no more than it.
"""

from collections.abc import Mapping, Sequence


def fair_rates(flows: Sequence[tuple[str, ...]], capacity: Mapping[str, float]) -> list[float]:
    """Return the rate of each flow.

    Args:
        flows: the resources that each flow goes through; at least one, none twice.
        capacity: what each resource can carry, in the unit of the rates.
    """
    rates = [0.0] * len(flows)
    users: dict[str, list[int]] = {}
    for index, resources in enumerate(flows):
        for name in resources:
            users.setdefault(name, []).append(index)
    if all(len(indices) == 1 for indices in users.values()):
        return [min(capacity[name] for name in resources) for resources in flows]
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
