"""Combinations of keys that cannot be."""

from typing import TYPE_CHECKING

from outsize.optim.optimizer_names import OWN, users_of_keys

if TYPE_CHECKING:
    from outsize.config.schema import Config


# What a trainer of another library does as by default.
_DEFAULT_ALONE = (
    *("data.window", "data.weight", "train.loss_function", "train.neftune_noise_alpha", "train.on_nonfinite"),
    *("optimizer.name", "optimizer.layer_decay", "optimizer.groups", "optimizer.gradients"),
)


def contradictions(config: "Config") -> list[str]:
    """Return one line ``key: what is wrong, and what to try`` for every combination that cannot be."""
    rules = (
        _portions,
        _warmup,
        _prefetch,
        _lora,
        _settings,
        _clip,
        _masters,
        _evaluation,
        _packing,
        _window,
        _masking,
        _loss,
        _objective,
        _compile,
        _kernels,
    )
    return [line for rule in rules for line in rule(config)]


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


def _masking(config: "Config") -> list[str]:
    """A token that is to be predicted becomes the mask token, or any, or stays: shares of one."""
    masked, random = config.data.mask_replace_prob, config.data.random_replace_prob
    if masked + random > 1:
        return [
            f"data.random_replace_prob: {random:g} and data.mask_replace_prob, {masked:g}, are more than all; lower "
            "one of them"
        ]
    return []


def _loss(config: "Config") -> list[str]:
    if config.train.loss == "chunked" and config.train.loss_function is not None:
        return [
            "train.loss: chunked is a loss by itself, and train.loss_function another; leave one of the two out"
        ]
    return []


def _objective(config: "Config") -> list[str]:
    objective = config.train.objective
    if objective == "sft":
        return []
    found = refused_by_trainers(config, f"with train.objective={objective}")
    if objective == "distill" and config.train.teacher is None:
        found.append("train.teacher: train.objective=distill learns from another model; name it")
    return found


def refused_by_trainers(config: "Config", where: str) -> list[str]:
    """Return one line for every setting that a trainer of another library cannot follow.

    Args:
        config: of the run.
        where: when that is, for the lines.
    """
    found = []
    for key in _DEFAULT_ALONE:
        section, _, name = key.partition(".")
        values = getattr(config, section)
        if getattr(values, name) != type(values).model_fields[name].default:
            found.append(f"{key}: {where} it has no other value than by default; leave it out")
    if config.lora.begins_with is not None:
        found.append(
            f"lora.from: {where} adapters begin anew; merge those that exist into the model (outsize export --merge, "
            "or PEFT's merge_and_unload), and name that as model.path"
        )
    if config.optimizer.clip == "unit":
        found.append(f"optimizer.clip: {where} it is global or none")
    if config.model.compile == "auto":
        found.append(f"model.compile: {where} nothing is timed before the first step; use off or blocks")
    if config.model.dtype == "fp16":
        found.append(f"model.dtype: {where} losses are not scaled, as fp16 needs; use bf16 or fp32")
    return found


def _compile(config: "Config") -> list[str]:
    """What is compiled returns nothing from within, and has kernels for each length; DDP sends gradients one by one."""
    train, activations = config.train, config.memory.activations
    refused = {
        "train.mlp_parts: 1": train.mlp_parts > 1,
        "parallel.mode: stream": config.parallel.mode == "ddp",
        "memory.activations: auto": activations.endswith(("-attention", "-products")),
        "data.group_by_length: false": config.data.is_grouped,
    }
    compiles = config.model.compile == "blocks"
    return [
        f"model.compile: blocks goes with {key}; or set it off"
        for key in refused
        if compiles and refused[key]
    ]


def _kernels(config: "Config") -> list[str]:
    """A compiler makes such kernels itself; and an MLP in parts runs its model's own forward."""
    refused = {
        "model.compile: off": config.model.compile != "off",
        "train.mlp_parts: 1": config.train.mlp_parts > 1,
    }
    kernels = config.model.kernels
    return [
        f"model.kernels: {kernels} goes with {key}; or set it none"
        for key in refused
        if kernels != "none" and refused[key]
    ]


def _warmup(config: "Config") -> list[str]:
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        return ["optimizer.warmup_ratio: give optimizer.warmup_steps or optimizer.warmup_ratio, not both"]
    if optimizer.min_lr > optimizer.lr:
        return [f"optimizer.min_lr: {optimizer.min_lr:g} is above optimizer.lr ({optimizer.lr:g}); lower it"]
    if config.train.epochs is None and config.warmup_steps >= steps:
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


def _settings(config: "Config") -> list[str]:
    """An optimizer has settings of its own, and those of another change nothing."""
    optimizer, fields = config.optimizer, type(config.optimizer).model_fields
    mine = OWN[optimizer.name].keys if optimizer.name in OWN else ()
    state = () if optimizer.name in OWN else ("state",)
    ways = "leave it out, {}set optimizer.name={}{}"
    between = ("or ", "") if optimizer.name in OWN else ("", ", or say what a class takes in optimizer.args")
    found = [
        f"optimizer.{key}: {optimizer.name} has none; "
        + ways.format(between[0], " or ".join(users), between[1])
        for key, users in {**users_of_keys(), **dict.fromkeys(state, tuple(OWN))}.items()
        if key not in mine and getattr(optimizer, key) != fields[key].default
    ]
    for key in optimizer.args if optimizer.name in OWN else ():
        if key not in OWN[optimizer.name].args:
            found.append(
                f"optimizer.args: {optimizer.name} takes no {key}; say its settings as keys of optimizer, or name a "
                "class, e.g. torch.optim.AdamW"
            )
    if not (optimizer.name in OWN and OWN[optimizer.name].products) and not all(
        group.muon for group in optimizer.groups
    ):
        found.append(
            f"optimizer.groups: muon: {optimizer.name} is another; leave it out, or set optimizer.name=muon"
        )
    return found


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
    return []


def _evaluation(config: "Config") -> list[str]:
    if config.eval.data is not None and config.eval.split:
        return ["eval.split: give eval.data or eval.split, not both"]
    return []


def _masters(config: "Config") -> list[str]:
    if config.optimizer.masters.startswith("split") and config.model.dtype in ("fp32", "fp16"):
        return [
            f"optimizer.masters: only those of bf16 weights can be split, not {config.model.dtype}; leave it auto"
        ]
    return []


def _packing(config: "Config") -> list[str]:
    """FlashAttention reads borders off positions only where a microbatch is one sequence, and takes no mask."""
    if config.data.pack == "documents" and config.model.attention == "flash_attention_2":
        return [
            "data.pack: documents are kept apart by a mask, and flash_attention_2 takes none; try "
            "model.attention: sdpa, or data.pack: none"
        ]
    return []


def _window(config: "Config") -> list[str]:
    """An order within windows knows no end of the data, and is of one source."""
    data, whole = config.data, "needs all data tokenised before the run begins; leave data.window out"
    if data.window is None:
        return []
    refused = {
        "data.pack": data.pack != "stream",
        "data.more": bool(data.more),
        "data.weight": data.weight != 1,
        "train.epochs": config.train.epochs is not None,
        "eval.split": bool(config.eval.split),
    }
    return [f"data.window: {key} {whole}" for key, is_set in refused.items() if is_set]
