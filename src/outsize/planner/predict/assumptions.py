"""What a prediction rests on: the machine's figures with their sources, and what is taken for granted."""

from dataclasses import dataclass

from outsize.planner.predict.prediction import Prediction
from outsize.planner.predict.question import Question
from outsize.planner.search.stage_layout import ARRIVALS

ALWAYS = (
    "a backward takes two forwards, and the recompute before it one",
    "matrix products reach the efficiency above whatever the size of a microbatch; those of experts 38 % of it",
    "activations and workspace are counted from the config; a run measures them on the model",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedFigure:
    """A figure that the prediction used.

    Attributes:
        name: what it is of.
        value: the number, in ``unit``.
        unit: its unit.
        source: where it comes from.
        measured: whether it was measured on the machine at hand.
    """

    name: str
    value: float
    unit: str
    source: str
    measured: bool


def figures_used(question: Question, prediction: Prediction) -> tuple[UsedFigure, ...]:
    """Return the figures of the first GPU, its link and the host; of the disk and copies between GPUs where used."""
    machine, dtype = question.machine, question.model.compute_dtype
    gpu, link, host, disk = machine.gpus[0], machine.links[0], machine.host, machine.disk
    rows = [
        (f"{gpu.name} {dtype} peak", gpu.peak_flops_per_s[dtype], "FLOP/s"),
        ("share of the peak reached", gpu.efficiency, ""),
        (f"{gpu.name} memory bandwidth", gpu.memory_bytes_per_s, "B/s"),
        ("link to the GPU", link.up_bytes_per_s, "B/s"),
        ("link from the GPU", link.down_bytes_per_s, "B/s"),
        ("host memory bandwidth", host.bytes_per_s, "B/s"),
        ("AdamW on the host", host.adamw_params_per_s, "parameters/s"),
    ]
    if gpu.fp8_gain is not None:
        rows.insert(2, ("linear layers of blocks in fp8", gpu.fp8_gain, "times as fast"))
    if question.options.state is not None and question.options.state.newton_schulz:
        on_device = prediction.plan.state.products_on_device
        place, rate = (gpu.name, gpu.products) if on_device else ("the host", host.products)
        rows.append((f"products on {place}, of Muon", rate, "FLOP/s"))
    if prediction.home == "disk" and disk is not None:
        rows += [
            ("disk reads", disk.read_bytes_per_s, "B/s"),
            ("disk writes", disk.write_bytes_per_s, "B/s"),
        ]
    if machine.peers and ARRIVALS in prediction.memory["device"]:
        rows.append(("link between GPUs", machine.peers[0].bytes_per_s, "B/s"))
    return tuple(
        UsedFigure(name=name, value=figure.value, unit=unit, source=figure.source, measured=figure.measured)
        for name, figure, unit in rows
    )
