"""Settings that change nothing in a run, because of what another key says."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outsize.config.schema import Config


def settings_without_effect(config: "Config") -> list[str]:
    """Return one sentence per setting that differs from its default and changes nothing in this run."""
    return [
        f"{key} has no effect: {why}"
        for rule in (_data, _train, _lora, _optimizer, _memory, _transport, _parallel, _telemetry)
        for key, why in rule(config)
        if _is_set(config, key)
    ]


def _is_set(config: "Config", key: str) -> bool:
    section_name, _, name = key.partition(".")
    section = getattr(config, section_name)
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def _data(config: "Config") -> Iterator[tuple[str, str]]:
    data = config.data
    if data.format not in ("auto", "text", "jsonl", "parquet"):
        yield "data.text_field", f"{data.format} records have no such field"


def _train(config: "Config") -> Iterator[tuple[str, str]]:
    train = config.train
    if train.loss == "model":
        yield "train.head_chunk_tokens", "train.loss is model"
    if train.resume == "auto" and train.run_dir is None:
        yield "train.resume", "without train.run_dir every run is a new one"
    if train.save_every >= train.steps:
        yield "train.save_every", "the run ends before, and saves at its end"
    if train.on_stall == "ignore":
        yield "train.stall_factor", "train.on_stall is ignore"
        yield "train.stall_floor_s", "train.on_stall is ignore"


def _lora(config: "Config") -> Iterator[tuple[str, str]]:
    if config.train.method == "full":
        for key in type(config.lora).model_fields:
            yield f"lora.{key}", "train.method is full"


def _optimizer(config: "Config") -> Iterator[tuple[str, str]]:
    optimizer = config.optimizer
    if not optimizer.max_grad_norm:
        yield "optimizer.clip", "optimizer.max_grad_norm is 0"
    if not _gradients_wait(config):
        yield "optimizer.gradients", "gradients do not wait for a global norm"
    if optimizer.name == "sgd" and not optimizer.momentum:
        yield "optimizer.state", "sgd without momentum keeps none"
    if optimizer.clip == "none":
        yield "optimizer.max_grad_norm", "optimizer.clip is none"


def _has_global_norm(config: "Config") -> bool:
    return config.optimizer.clip == "global" and bool(config.optimizer.max_grad_norm)


def _gradients_wait(config: "Config") -> bool:
    """Whether gradients wait at home: for the norm of all, for a step that may be skipped, or to be decoded."""
    skips = config.train.on_nonfinite == "skip" or config.model.dtype == "fp16"
    return _has_global_norm(config) or skips or config.transport.gradients not in ("raw", "auto")


def _has_several_workers(config: "Config") -> bool:
    device = config.memory.device
    emulated = device.startswith("emulated:") and device != "emulated:1"
    return device == "cuda:all" or "," in device or emulated


def _memory(config: "Config") -> Iterator[tuple[str, str]]:
    memory = config.memory
    if not memory.device.startswith("emulated"):
        yield "memory.link_gb_per_s", "only emulated devices have a throttled link"
        yield "memory.peer_gb_per_s", "only emulated devices copy to each other as fast as one likes"
    if _has_several_workers(config):
        for key in ("slots", "prefetch", "offload"):
            yield f"memory.{key}", "several workers have slots for their stages, and hand inputs over"
    if memory.home == "host":
        for key in ("disk_memory", "commits", "store_dir"):
            yield f"memory.{key}", "memory.home is host"
        if _has_global_norm(config):
            yield "memory.tile_elements", "memory.home is host"


def _transport(config: "Config") -> Iterator[tuple[str, str]]:
    if config.memory.offload is False and not _has_several_workers(config):
        yield "transport.activations", "memory.offload is false"


def _parallel(config: "Config") -> Iterator[tuple[str, str]]:
    parallel = config.parallel
    if not _has_several_workers(config):
        yield "parallel.handover", "one device hands nothing over"
    if parallel.mode == "ddp":
        yield "parallel.gradients", "parallel.mode is ddp"
        yield "parallel.weights", "parallel.mode is ddp"
    if parallel.ddp_compress != "powersgd":
        yield "parallel.ddp_powersgd_rank", "parallel.ddp_compress is not powersgd"


def _telemetry(config: "Config") -> Iterator[tuple[str, str]]:
    telemetry = config.telemetry
    if not {"wandb", "trackio"} & set(telemetry.writers):
        yield "telemetry.project", "neither wandb nor trackio is among telemetry.writers"
    if not telemetry.writers:
        yield "telemetry.every", "telemetry.writers is empty"
