"""The machine that ``outsize plan`` is asked about: GPUs by name or by their figures, and the host around them.

What several nodes ask of a plan: an even share each, a network, and what is written on it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import yaml

from outsize import files
from outsize.cli.plan.plan_options import PlanFlags
from outsize.codecs.transport import EXACT, Wire
from outsize.errors import ConfigError
from outsize.hardware.cards import (
    ADAMW_BYTES,
    ADAMW_PARAMS_PER_CORE_S,
    NVME,
    Card,
    Kernels,
    find_card,
    machine_of,
    split_count,
)
from outsize.hardware.link_fit import AllReduceRates
from outsize.hardware.machine_spec import Disk, Figure, Host, Machine
from outsize.units import parse_bytes

_SPEC_EXAMPLE = "memory=24GB,tflops=165,gbps=1008,pcie=4x16"
_MOST = 1e6  # TFLOPS, GB/s or GPUs: a thousand times what any card or machine has
_SPEC_KEYS = ("memory", "tflops", "gbps", "pcie", "share", "name", "count")
_HALF = ("bf16", "fp16")
_FACTORS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def machine_from(options: PlanFlags) -> Machine:
    """Return the machine that the options describe.

    Raises:
        ConfigError: none, more than one, or figures that are none.
    """
    named = [options.gpus is not None, options.machine is not None, options.gpu_spec is not None]
    if sum(named) != 1:
        raise ConfigError(
            f"say which machine, once: --gpus 8x4090, --machine machine.json, or --gpu-spec {_SPEC_EXAMPLE}"
        )
    fp8 = options.products == "fp8"
    if fp8 and (options.gpus is None or options.kernels != "fused"):
        raise ConfigError(
            "--products fp8: what it gains is known of published GPUs and of systems whose kernels cast as well: name "
            "the GPUs by --gpus, and add --kernels fused (a run: model.compile=blocks)"
        )
    if options.machine is not None:
        from outsize.hardware.from_probe import (
            read_machine,  # the form of a probe's file takes a while to load
        )

        described: object = options.machine
        if isinstance(described, Machine):  # of a program's
            return _with_host(described, options)
        if options.machine.suffix in (".yaml", ".yml"):
            return _in_words(options.machine, options)
        if options.kernels in ("eager", "fused"):
            raise ConfigError(
                "--kernels: eager and fused have no effect on a machine whose products were measured; leave it out"
            )
        return _with_host(read_machine(options.machine), options)
    if options.gpu_spec is not None:
        machine = _described(options.gpu_spec, options)
    else:
        assert options.gpus is not None
        count, name = split_count(options.gpus)
        machine = machine_of(find_card(name), count, _kernels(options), fp8=fp8)
    return _with_host(machine, options)


def _in_words(path: Path, options: PlanFlags) -> Machine:
    """Return the machine of a YAML file with options of the command, and switches that GPUs are behind."""
    try:
        fields = yaml.safe_load(files.read_text(path)) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    keys = ("gpus", "gpu_spec", "ram", "cpu_cores", "disk", "disk_read", "disk_write", "pinned")
    if not isinstance(fields, dict) or (unknown := fields.keys() - {*keys, "switches"}):
        named = sorted(map(str, unknown)) if isinstance(fields, dict) else "no keys"
        raise ConfigError(f"{path}: {named}; a machine in words has {', '.join(keys)} and switches")
    switches, pinned = fields.pop("switches", None) or {}, fields.pop("pinned", None)
    if not isinstance(switches, dict):
        raise ConfigError(
            f"{path}: switches is {switches!r}; write each by its name: plx: {{uplink: 25GB, gpus: [0, 1]}}"
        )
    if not fields.keys() & {"gpus", "gpu_spec"} and not options.named & {"gpus", "gpu_spec"}:
        raise ConfigError(f"{path}: it names no GPUs; write for example gpus: 4x4090, or gpu_spec")
    if not isinstance(fields.get("cpu_cores", 1), int):
        raise ConfigError(f"{path}: cpu_cores is a number, not {fields['cpu_cores']!r}")
    words = {
        name: value if name == "cpu_cores" else str(value)
        for name, value in fields.items()
        if name not in options.named  # what stands on the command line comes first
    }
    described: Callable[..., PlanFlags] = replace
    machine = machine_from(described(options, machine=None, **words))
    links, uplinks = list(machine.links), dict(machine.uplinks)
    for name, switch in switches.items():
        if not (
            isinstance(switch, dict)
            and switch.keys() == {"uplink", "gpus"}
            and isinstance(switch["gpus"], list)
        ):
            raise ConfigError(f"{path}: switches.{name} has uplink, such as 25GB, and gpus, such as [0, 1]")
        uplinks[str(name)] = Figure(value=_rate("uplink", str(switch["uplink"])), source=path.name)
        for gpu in switch["gpus"]:
            if gpu not in range(len(links)):
                raise ConfigError(f"{path}: switches.{name}: there is no GPU {gpu} among {len(links)}")
            if links[gpu].switch in set(map(str, switches)):
                raise ConfigError(f"{path}: switches.{name}: GPU {gpu} is behind {links[gpu].switch} already")
            links[gpu] = replace(links[gpu], switch=str(name))
    limit = None if pinned is None else size_of(f"{path}: pinned", str(pinned))
    return replace(
        machine, host=replace(machine.host, pinned_bytes=limit), links=tuple(links), uplinks=uplinks
    )


def _kernels(options: PlanFlags) -> Kernels:
    """Return what computes, of which there may be a rate."""
    named = options.kernels or "eager"
    return "compiled" if named == "eager" and options.compile == "blocks" else named


def size_of(option: str, text: str) -> int:
    """Return the bytes that an option names.

    Raises:
        ConfigError: no size, or a number without a unit that is too small to be bytes.
    """
    try:
        num_bytes = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error
    if re.fullmatch(r"\s*[0-9.]+\s*", text) and 0 < num_bytes < 2**20:
        number = text.strip()
        raise ConfigError(
            f"{option}: {number} without a unit is {number} bytes; write {number}GB, {number}GiB or {number}B"
        )
    if num_bytes <= 0:
        raise ConfigError(f"{option}: it is more than nothing; write for example 64GB")
    return num_bytes


def _described(text: str, options: PlanFlags) -> Machine:
    fields = dict(_pairs(text))
    missing = [key for key in ("memory", "tflops", "gbps") if key not in fields]
    if missing:
        raise ConfigError(f"--gpu-spec lacks {' and '.join(missing)}; write for example {_SPEC_EXAMPLE}")
    generation, lanes = _slot(fields.get("pcie", "4x16"))
    rate = _number("tflops", fields["tflops"]) * 1e12
    source = "--gpu-spec"
    card = Card(
        name=fields.get("name", "described"),
        aliases=(),
        kind="",
        memory_bytes=size_of("--gpu-spec memory", fields["memory"]),
        memory_bytes_per_s=_number("gbps", fields["gbps"]) * 1e9,
        peaks={**dict.fromkeys(_HALF, rate), "fp32": rate if options.dtype == "fp32" else rate / 2},
        pcie_generation=generation,
        lanes=lanes,
        peer="none",
        peer_bytes_per_s=0.0,
        source=source,
    )
    count = int(_number("count", fields.get("count", "1")))
    machine = machine_of(card, count, _kernels(options))
    if "share" not in fields:
        return machine
    share = _number("share", fields["share"])
    if share > 1:
        raise ConfigError("--gpu-spec share: products reach at most all of the peak; write for example 0.7")
    figure = Figure(value=share, source=source)
    return replace(machine, gpus=tuple(replace(gpu, efficiency=figure) for gpu in machine.gpus))


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs = []
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or key not in _SPEC_KEYS:
            near = get_close_matches(key, _SPEC_KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_SPEC_KEYS)}"
            raise ConfigError(f"--gpu-spec: not a figure: {part.strip()!r}; {hint}, as in {_SPEC_EXAMPLE}")
        pairs.append((key, value))
    return pairs


def _slot(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([345])(?:\.0)?x(1|2|4|8|16)", text.lower())
    if match is None:
        raise ConfigError(f"--gpu-spec pcie: not a slot: {text!r}; write for example 4x16 or 5x8")
    return int(match[1]), int(match[2])


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"--gpu-spec {key}: not a number: {text!r}, as in {_SPEC_EXAMPLE}") from error
    if not 0 < value <= _MOST or (key == "count" and value != int(value)):
        raise ConfigError(f"--gpu-spec {key}: {text} describes no GPU, as in {_SPEC_EXAMPLE}")
    return value


def _with_host(machine: Machine, options: PlanFlags) -> Machine:
    """Return ``machine`` with what the options say of its host and disk."""
    host = machine.host
    if options.ram is not None:
        host = replace(host, memory_bytes=size_of("--ram", options.ram))
    if options.cpu_cores is not None:
        host = _with_cores(host, options.cpu_cores)
    return replace(machine, host=host, disk=_with_disk(machine.disk, options))


def _with_cores(host: Host, cores: int) -> Host:
    if cores < 1:
        raise ConfigError("--cpu-cores: a host has at least one")
    bound = min(cores * ADAMW_PARAMS_PER_CORE_S, host.bytes_per_s.value / ADAMW_BYTES)
    source = f"--cpu-cores {cores}: each steps 0.9 G parameters/s, and memory bounds all of them"
    return replace(host, cores=cores, adamw_params_per_s=Figure(value=bound, source=source))


def _with_disk(disk: Disk | None, options: PlanFlags) -> Disk | None:
    if options.disk is not None and options.disk.strip().lower() == "none":
        if options.disk_read is not None or options.disk_write is not None:
            raise ConfigError(
                "--disk none: a machine without a disk reads and writes nothing; leave the rates out"
            )
        return None
    disk = disk or (NVME if options.disk or options.disk_read or options.disk_write else None)
    if disk is not None and options.disk is not None:
        disk = replace(disk, capacity_bytes=size_of("--disk", options.disk))
    if disk is not None and (read := options.disk_read) is not None:
        rate = Figure(value=_rate("--disk-read", read), source="--disk-read")
        disk = replace(disk, read_bytes_per_s=rate)
    if disk is not None and (write := options.disk_write) is not None:
        rate = Figure(value=_rate("--disk-write", write), source="--disk-write")
        disk = replace(disk, write_bytes_per_s=rate)
    return disk


def _rate(option: str, text: str) -> float:
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kMGT]?)B(?:/s|ps)?\s*", text)
    if match is None or not float(match[1]):
        raise ConfigError(f"{option}: not a rate: {text!r}; write for example 7GB, in bytes per second")
    return float(match[1]) * _FACTORS[match[2]]


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
    """Return how gradients are written between nodes.

    Raises:
        ConfigError: there is one node.
    """
    wire = Wire(gradients=options.net_gradients)
    if options.nodes == 1 and wire != EXACT:
        raise ConfigError("--net-gradients has no effect with one node; say how many with --nodes")
    return wire


def net_of(options: PlanFlags) -> Figure | None:
    """Return the rate of the network; of one node, None.

    It is bits per second where it ends in ``b``, bytes where in ``B``, or what a file of ``outsize all-reduce`` says.

    Raises:
        ConfigError: a network for one node, none for several, no rate, or units clipped by themselves.
    """
    text = options.net
    if options.nodes == 1:
        if text is not None:
            raise ConfigError("--net has no effect with one node; say how many with --nodes")
        return None
    if options.clip == "unit":
        raise ConfigError("--clip unit: several nodes clip by the norm of all gradients; use global, or none")
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
    remedy = "write them with outsize all-reduce --output FILE"
    fields = files.read_json(path, ConfigError, remedy)
    try:
        rates = AllReduceRates.model_validate(fields.get("all_reduce") or fields)
    except ValueError as error:
        raise ConfigError(f"--net {path}: no rates in it; {remedy}") from error
    if rates.fit is None:
        raise ConfigError(f"--net {path}: nothing was measured: {rates.note}")
    source = f"sums over {rates.num_ranks} ranks by {rates.backend}, in {path.name}"
    return Figure(value=rates.fit.bytes_per_s, source=source, measured=True)
