"""A run's YAML file as a question of ``outsize plan``: its settings stand where the command line says nothing."""

from dataclasses import replace
from typing import Any

from outsize.cli.plan.plan_options import PlanFlags
from outsize.config import Config, load_config

# Settings of a run by the option that names them.
SETTINGS = {
    "model.dtype": "dtype",
    "model.products": "products",
    "model.compile": "compile",
    "data.path": "data",
    "train.microbatches": "microbatches",
    "train.mlp_parts": "mlp_parts",
    "train.head_chunk_tokens": "head_chunk_tokens",
    "optimizer.max_grad_norm": "max_grad_norm",
    "optimizer.clip": "clip",
    "optimizer.name": "optimizer",
    "optimizer.state": "optimizer_state",
    "optimizer.masters": "masters",
    "optimizer.ns_on": "ns_on",
    "memory.home": "home",
    "memory.commits": "commits",
    "memory.resident": "resident",
    "transport.weights": "transport_weights",
    "parallel.gradients": "net_gradients",
    "parallel.weights": "net_weights",
}
# More of them, which options write in another way.
_ALSO = {
    "train.method": "method",
    "data.seq_len": "seq_len",
    "lora.r": "lora_r",
    "lora.base_codec": "base_codec",
}


def is_run(model: str) -> bool:
    """Return whether ``model`` names the YAML file of a run rather than a model."""
    return model.endswith((".yaml", ".yml"))


def read_run(path: str) -> Config:
    """Return the configuration in a YAML file; the environment is that of another machine.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """
    return load_config(path, environ={})


def with_run(options: PlanFlags) -> PlanFlags:
    """Return ``options`` with the settings of the run whose file is their model, but for those that the user wrote.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """
    if not is_run(options.model):
        return options
    run = read_run(options.model)
    values: dict[str, Any] = {}
    for setting, option in (SETTINGS | _ALSO).items():
        section, key = setting.split(".")
        values[option] = getattr(getattr(run, section), key)
    values["tokens_per_step"] = run.tokens_per_step
    values["resident"] = str(run.memory.resident)
    values["kernels"] = None if run.model.kernels == "none" else run.model.kernels
    for budget in ("device_memory", "host_memory"):
        num_bytes = getattr(run.memory, budget)
        values[budget] = None if num_bytes is None else f"{num_bytes}B"
    if run.model.dtype == "auto":
        del values["dtype"]
    return replace(
        options, **{option: value for option, value in values.items() if option not in options.named}
    )
