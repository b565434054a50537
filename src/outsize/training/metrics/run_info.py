"""``run.json``: what the lines of a heartbeat are lines of: model, machine, and what the device promises."""

import time
from typing import Any

import torch
from torch import nn

from outsize import __version__
from outsize.hardware.inventory import take_inventory
from outsize.model.sizes.model_spec import ModelSpec
from outsize.session.job.machine import RunMachine
from outsize.session.job.prepare import Job
from outsize.training.metrics.flops import Peak

SCHEMA_VERSION = 1


def about(prepared: Job, flops: float | None, peak: Peak) -> dict[str, Any]:
    """Return what JSON knows of a run that begins or goes on now.

    Args:
        prepared: the run.
        flops: of forward and backward of a step; None where they are not known.
        peak: of all devices.
    """
    config = prepared.config
    return {
        **describe(prepared.split.model, prepared.split.spec, prepared.machine, prepared.dtype, flops, peak),
        "steps": config.train.steps,
        "plan_id": prepared.plan.plan_id,
        "tokens_per_step": config.tokens_per_step,
        "tokens_per_microbatch": -(-prepared.num_sequences // config.microbatches) * config.data.seq_len,
    }


def describe(
    model: nn.Module, spec: ModelSpec, machine: RunMachine, dtype: str, flops: float | None, peak: Peak
) -> dict[str, Any]:
    """Return what JSON knows of a model that is trained from now on, whoever writes the loop.

    Args:
        model: the model.
        spec: its units.
        machine: device and budgets.
        dtype: in which the model computes.
        flops: of forward and backward of a step; None where they are not known.
        peak: of all devices.
    """
    return {
        "schema": SCHEMA_VERSION,
        "started": time.time(),
        "outsize": __version__,
        "model": type(model).__name__,
        "num_parameters": spec.num_parameters,
        "num_trainable": spec.num_trainable,
        "dtype": dtype,
        "units": [
            {"index": u.index, "name": u.name, "kind": u.kind, "weight_bytes": u.weight_bytes(spec.dtype)}
            for u in spec.units
        ],
        "device": str(machine.devices),
        "device_names": list(dict.fromkeys(machine.devices.titles)) or list(machine.devices.names),
        "num_workers": machine.num_workers,
        "flops_per_step": flops,
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "fp32_flops_per_s": peak.fp32_flops_per_s,
        "num_threads": torch.get_num_threads(),
        "machine": take_inventory([]).model_dump(mode="json"),
    }
