"""What concerns more than one key: combinations that cannot be, and settings that have no effect."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from outsize.config.schema import Config


def contradictions(config: "Config") -> list[str]:
    """Return one line ``key: what is wrong, and what to try`` for every combination that cannot be."""
    return [line for rule in (_portions, _warmup, _prefetch, _lora, _clip) for line in rule(config)]


def _portions(config: "Config") -> list[str]:
    """A step is a whole number of sequences, and at least one of them per microbatch."""
    seq_len, microbatches = config.data.seq_len, config.microbatches
    if config.tokens_per_step % seq_len:
        below = max(config.tokens_per_step // seq_len, 1) * seq_len
        return [
            f"train.tokens_per_step: {config.tokens_per_step} is not a multiple of data.seq_len ({seq_len}); "
            f"try {below} or {below + seq_len}"
        ]
    if config.sequences_per_step < microbatches:
        return [
            f"train.microbatches: {microbatches} microbatches need as many sequences, but "
            f"{config.tokens_per_step} tokens per step are {config.sequences_per_step} of {seq_len} tokens; "
            f"lower train.microbatches or raise train.tokens_per_step"
        ]
    return []


def _warmup(config: "Config") -> list[str]:
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        return ["optimizer.warmup_ratio: give optimizer.warmup_steps or optimizer.warmup_ratio, not both"]
    if config.warmup_steps >= steps:
        return [
            f"optimizer.warmup_steps: {config.warmup_steps} steps of warm-up do not fit before the end of "
            f"train.steps ({steps}); lower it, for example to 0, or train for more steps"
        ]
    return []


def _prefetch(config: "Config") -> list[str]:
    slots, prefetch = config.memory.slots, config.memory.prefetch
    if slots is not None and prefetch is not None and prefetch >= slots:
        return [
            f"memory.prefetch: {prefetch} units ahead of the one that computes need {prefetch + 1} slots, "
            f"but memory.slots is {slots}"
        ]
    return []


def _lora(config: "Config") -> list[str]:
    if config.train.method == "lora" and config.model.freeze:
        return ["model.freeze: with train.method=lora the whole model is frozen; leave it out"]
    return []


def _clip(config: "Config") -> list[str]:
    if (
        config.optimizer.clip == "unit"
        and config.train.on_nonfinite == "skip"
        and config.optimizer.max_grad_norm
    ):
        return [
            "optimizer.clip: unit steps a unit before the gradients of all are known, and train.on_nonfinite=skip "
            "needs them; use optimizer.clip=global, or train.on_nonfinite=raise"
        ]
    if config.optimizer.masters == "split" and config.model.dtype in ("fp32", "fp16"):
        return [
            f"optimizer.masters: only those of bf16 weights can be split, not {config.model.dtype}; leave it auto"
        ]
    return []


def settings_without_effect(config: "Config") -> list[str]:
    """Return one sentence per setting that differs from its default and changes nothing in this run."""
    data, train, memory, telemetry = config.data, config.train, config.memory, config.telemetry
    optimizer = config.optimizer
    parallel = config.parallel
    untracked = not {"wandb", "trackio"} & set(telemetry.writers)
    unread_text_field = data.format not in ("auto", "text", "jsonl", "parquet")
    emulated = memory.device.startswith("emulated")
    several = memory.device == "cuda:all" or "," in memory.device
    several |= emulated and memory.device not in ("emulated", "emulated:1")
    stages = "several workers have slots for their stages, and hand inputs over"
    full = train.method == "full"
    unused_resume = train.resume == "auto" and train.run_dir is None
    idle = [
        (data, "data.text_field", unread_text_field, f"{data.format} records have no such field"),
        (train, "train.head_chunk_tokens", train.loss == "model", "train.loss is model"),
        (train, "train.resume", unused_resume, "without train.run_dir every run is a new one"),
        (
            train,
            "train.save_every",
            train.save_every >= train.steps,
            "the run ends before, and saves at its end",
        ),
        (train, "train.stall_factor", train.on_stall == "ignore", "train.on_stall is ignore"),
        (train, "train.stall_floor_s", train.on_stall == "ignore", "train.on_stall is ignore"),
        *(
            (config.lora, f"lora.{key}", full, "train.method is full")
            for key in type(config.lora).model_fields
        ),
        *(
            (parallel, f"parallel.{key}", parallel.mode == "ddp", "parallel.mode is ddp")
            for key in ("gradients", "weights")
        ),
        (optimizer, "optimizer.clip", not optimizer.max_grad_norm, "optimizer.max_grad_norm is 0"),
        (
            optimizer,
            "optimizer.gradients",
            optimizer.clip != "global" or not optimizer.max_grad_norm,
            "gradients do not wait for a global norm",
        ),
        (optimizer, "optimizer.max_grad_norm", optimizer.clip == "none", "optimizer.clip is none"),
        (
            parallel,
            "parallel.ddp_powersgd_rank",
            parallel.ddp_compress != "powersgd",
            "parallel.ddp_compress is not powersgd",
        ),
        (telemetry, "telemetry.project", untracked, "neither wandb nor trackio is among telemetry.writers"),
        (telemetry, "telemetry.every", not telemetry.writers, "telemetry.writers is empty"),
        (memory, "memory.link_gb_per_s", not emulated, "only emulated devices have a throttled link"),
        (memory, "memory.slots", several, stages),
        (memory, "memory.prefetch", several, stages),
        (memory, "memory.offload", several, stages),
        (
            memory,
            "memory.activations",
            several and memory.activations == "keep",
            "several workers keep as auto does",
        ),
        (config.transport, "transport.activations", memory.offload is False, "memory.offload is false"),
        (memory, "memory.disk_memory", memory.home == "host", "memory.home is host"),
        (memory, "memory.commits", memory.home == "host", "memory.home is host"),
        (memory, "memory.store_dir", memory.home == "host", "memory.home is host"),
        (
            memory,
            "memory.tile_elements",
            memory.home == "host" and optimizer.clip == "global" and bool(optimizer.max_grad_norm),
            "memory.home is host",
        ),
    ]
    return [
        f"{key} has no effect: {why}" for section, key, idles, why in idle if idles and _is_set(section, key)
    ]


def _is_set(section: "BaseModel", key: str) -> bool:
    name = key.rpartition(".")[2]
    return bool(getattr(section, name) != type(section).model_fields[name].default)
