"""What several nodes ask of a plan: an even share each, a network, and what is written on it."""

import json
import re
from pathlib import Path

from outsize.cli.plan_options import PlanFlags
from outsize.codecs.wire import EXACT, Wire
from outsize.errors import ConfigError
from outsize.hardware.all_reduce_arithmetic import AllReduceRates
from outsize.hardware.machine_spec import Figure

_FACTORS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def check_nodes(options: PlanFlags) -> None:
    """Refuse what several nodes cannot do together.

    Raises:
        ConfigError: each unit is clipped by itself.
    """
    if options.nodes > 1 and options.clip == "unit":
        raise ConfigError("--clip unit: several nodes clip by the norm of all gradients; use global, or none")


def share_of(sequences: int, nodes: int) -> int:
    """Return how many of the sequences of a step each node trains.

    Raises:
        ConfigError: no node, or shares that are not even.
    """
    if nodes < 1:
        raise ConfigError(f"--nodes: {nodes} machines train nothing; there is at least one")
    if sequences % nodes:
        raise ConfigError(
            f"--nodes: {sequences} sequences of a step are not shared evenly by {nodes} nodes; name --tokens-per-step"
        )
    return sequences // nodes


def wire_of(options: PlanFlags) -> Wire:
    """Return how gradients and weights are written between nodes.

    Raises:
        ConfigError: there is one node, or weights in fp32 would be written as changed bits.
    """
    wire = Wire(gradients=options.net_gradients, weights=options.net_weights)
    if options.nodes == 1 and wire != EXACT:
        raise ConfigError(
            "--net-gradients and --net-weights have no effect with one node; say how many with --nodes"
        )
    if wire.weights == "delta" and options.dtype == "fp32":
        raise ConfigError("--net-weights: delta is of 16-bit weights; leave it raw, or choose --dtype bf16")
    return wire


def net_of(options: PlanFlags) -> Figure | None:
    """Return the rate of the network; of one node, None.

    It is bits per second where it ends in ``b``, bytes where in ``B``, or what a file of ``outsize all-reduce`` says.

    Raises:
        ConfigError: a network for one node, none for several, or no rate.
    """
    text = options.net
    if options.nodes == 1:
        if text is not None:
            raise ConfigError("--net has no effect with one node; say how many with --nodes")
        return None
    if text is None:
        raise ConfigError(
            "--nodes needs the rate of the network: --net 25Gb, or a file of outsize all-reduce"
        )
    if Path(text).is_file():
        return _summed(Path(text))
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kMGT])(b|bit|B)(?:/s|ps)?\s*", text)
    if match is None or not float(match[1]):
        raise ConfigError(
            f"--net: neither a rate nor a file: {text!r}; write 25Gb for gigabits or 3GB for gigabytes per second"
        )
    rate = float(match[1]) * _FACTORS[match[2]]
    return Figure(value=rate if match[3] == "B" else rate / 8, source=f"--net {text.strip()}")


def _summed(path: Path) -> Figure:
    """Return what each rank sends while all sum, by a file of ``outsize all-reduce`` or of ``outsize probe``."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        rates = AllReduceRates.model_validate(told.get("all_reduce") or told)
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--net {path}: no rates in it; write them with outsize all-reduce --output FILE"
        ) from error
    if rates.fit is None:
        raise ConfigError(f"--net {path}: nothing was measured: {rates.note}")
    source = f"sums over {rates.num_ranks} ranks by {rates.backend}, in {path.name}"
    return Figure(value=rates.fit.bytes_per_s, source=source, measured=True)
