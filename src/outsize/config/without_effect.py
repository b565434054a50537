"""Settings that change nothing in a run: for every key of the configuration, when it does not, in one table.

A key that never stands idle has an empty row. What the configuration leaves open, such as which home ``auto`` is, comes
from `Surroundings`; where nobody knows it yet, nothing is said that depends on it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from outsize.config.schema import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What decides over a setting and is not in the configuration; None where it is not known.

    Attributes:
        num_processes: that train together.
        num_numa_nodes: of the machine.
        device: that ``memory.device`` comes to.
        home: that ``memory.home`` comes to.
        dtype: that ``model.dtype`` comes to.
        chunks_loss: whether head and loss are computed in chunks.
        container: kind of the data's files: ``text``, ``json``, ``csv``, ``tsv``, ``parquet`` or ``tokens``.
        one_file: whether the data is a file and not a directory.
        masks: whether the model is a masked language model.
        by_trainer: whether a trainer of another library trains, as it does for each `train.objective` but sft.
    """

    num_processes: int = 1
    num_numa_nodes: int | None = None
    device: str | None = None
    home: str | None = None
    dtype: str | None = None
    chunks_loss: bool | None = None
    container: str | None = None
    one_file: bool | None = None
    masks: bool | None = None
    by_trainer: bool = False


@dataclass(frozen=True, slots=True)
class _Case:
    """What the conditions below are asked of."""

    config: "Config"
    around: Surroundings

    @property
    def device(self) -> str:
        return self.around.device or self.config.memory.device

    @property
    def home(self) -> str:
        return self.around.home or self.config.memory.home

    def is_emulated(self) -> bool:
        return self.device.startswith("emulated")

    def has_several_workers(self) -> bool:
        several = self.is_emulated() and self.device not in ("emulated", "emulated:1")
        return several or self.device.endswith(":all") or "," in self.device

    def is_alone(self) -> bool:
        return self.around.num_processes == 1

    def is_replicated(self) -> bool:
        return not self.is_alone() and self.config.parallel.mode == "ddp"

    def has_global_norm(self) -> bool:
        return self.config.optimizer.clip == "global" and bool(self.config.optimizer.max_grad_norm)

    def gradients_wait(self) -> bool:
        """For the norm of all, for a step that may be skipped, or to be decoded."""
        skips = self.config.train.on_nonfinite == "skip" or "fp16" in (self.dtype, self.config.model.dtype)
        return self.has_global_norm() or skips or self.config.transport.gradients not in ("raw", "auto")

    @property
    def dtype(self) -> str:
        return self.around.dtype or self.config.model.dtype

    @property
    def schedule(self) -> str:
        return self.config.optimizer.schedule

    def has_no_min_lr(self) -> bool:
        return self.schedule not in ("cosine", "wsd")

    def learns(self, *objectives: str) -> bool:
        return self.config.train.objective in objectives

    def by_trainer(self) -> bool:
        return self.around.by_trainer or not self.learns("sft")

    def saves_once(self) -> bool:
        """Whether the checkpoint at the end is the only one; a run that goes on may find others."""
        train = self.config.train
        commits = self.home == "disk" and self.config.memory.commits == "step" and not self.is_replicated()
        by_clock = not commits if train.save_minutes is None else train.save_minutes > 0
        return not 0 < train.save_every < train.steps and not by_clock and train.resume == "none"


_Row = tuple[tuple[str, Callable[[_Case], bool]], ...]

_ALWAYS: Final[_Row] = ()
# Who trains with several processes, and how.
_ALONE: Final[_Row] = (("a single process trains", _Case.is_alone),)
_REPLICATED: Final[_Row] = (("parallel.mode is ddp", _Case.is_replicated),)
_ONLY_DDP: Final[_Row] = (*_ALONE, ("parallel.mode is not ddp", lambda case: not case.is_replicated()))
_MASKS: Final[_Row] = (
    ("the model predicts the next token and not hidden ones", lambda case: case.around.masks is False),
    ("train.objective predicts no hidden tokens", lambda case: not case.learns("sft")),
)
_FULL: Final[_Row] = (("train.method is full", lambda case: case.config.train.method == "full"),)
_NO_STALL: Final[_Row] = (("train.on_stall is ignore", lambda case: case.config.train.on_stall == "ignore"),)
_STAGES: Final[_Row] = (
    ("several workers have slots for their stages, and hand inputs over", _Case.has_several_workers),
    *_REPLICATED,
)
_HOST_HOME: Final[_Row] = (("the home is in host memory", lambda case: case.home == "host"), *_REPLICATED)
_NO_EVALUATION: Final[_Row] = (
    ("neither eval.data nor eval.split says what on", lambda case: not case.config.eval.on),
)
_NO_RECORDS: Final[_Row] = (
    (
        "files of this kind hold no records",
        lambda case: case.around.container in ("text", "tokens") and not case.config.data.more,
    ),
)
# What trainers of other libraries go without, and what they need not know of records with fields of their own.
_TRAINERS: Final[_Row] = (("a trainer of another library trains", _Case.by_trainer),)
_FIELDS: Final[_Row] = (
    ("records have fields of their own", lambda case: case.by_trainer() and not case.learns("distill")),
)
_NO_WRITERS: Final[_Row] = (("telemetry.writers is empty", lambda case: not case.config.telemetry.writers),)
# An optimizer that lacks a setting refuses it (`config_rules`), so that rows of such are empty.
_OPTIMIZER: Final[Mapping[str, _Row]] = {
    **dict.fromkeys(
        ("name", "args", "lr", "betas", "eps", "momentum", "nesterov", "ns_steps", "ns_on"), _ALWAYS
    ),
    **dict.fromkeys(("adjust_lr_fn", "weight_decay", "layer_decay", "state"), _ALWAYS),
    **dict.fromkeys(("groups", "schedule", "warmup_steps", "warmup_ratio"), _ALWAYS),
    "min_lr": (("optimizer.schedule is neither cosine nor wsd", _Case.has_no_min_lr),),
    "decay_ratio": (("optimizer.schedule is not wsd", lambda case: case.schedule != "wsd"),),
    "restarts": (
        ("optimizer.schedule is not cosine_restarts", lambda case: case.schedule != "cosine_restarts"),
    ),
    "max_grad_norm": (("optimizer.clip is none", lambda case: case.config.optimizer.clip == "none"),),
    "clip": (("optimizer.max_grad_norm is 0", lambda case: not case.config.optimizer.max_grad_norm),),
    "gradients": (("gradients do not wait for a global norm", lambda case: not case.gradients_wait()),),
    "masters": (
        ("only beside bf16 weights is there a choice", lambda case: case.dtype in ("fp32", "fp16")),
        *_TRAINERS,
    ),
}

NO_EFFECT: Final[Mapping[str, _Row]] = {
    **dict.fromkeys(("model.path", "model.dtype", "model.attention", "model.freeze"), _ALWAYS),
    **dict.fromkeys(("model.compile", "model.kernels", "model.products", "model.trust_remote_code"), _ALWAYS),
    **dict.fromkeys(("data.path", "data.seq_len", "data.window"), _ALWAYS),
    **dict.fromkeys(("data.format", "data.pack"), _FIELDS),
    "data.group_by_length": (
        ("data.pack is not none", lambda case: case.config.data.pack != "none"),
        *_TRAINERS,
    ),
    **dict.fromkeys(("data.mlm_probability", "data.mask_replace_prob", "data.random_replace_prob"), _MASKS),
    "data.prefetch": _TRAINERS,
    "data.workers": (
        ("data.prefetch has one batch made at a time", lambda case: case.config.data.prefetch == 1),
        *_TRAINERS,
    ),
    "data.text_field": (
        (
            "records of data.format have no such field",
            lambda case: case.config.data.format not in ("auto", "text"),
        ),
        *_NO_RECORDS,
        *_FIELDS,
    ),
    **dict.fromkeys(("data.columns", "data.roles", "data.template"), _NO_RECORDS),
    "data.train_on": (*_NO_RECORDS, *_FIELDS),
    "data.max_bad_records": _NO_RECORDS,
    **dict.fromkeys(("data.more", "data.weight"), _ALWAYS),
    "data.glob": (("data.path is a file", lambda case: bool(case.around.one_file)),),
    "train.steps": (("train.epochs says how long", lambda case: case.config.train.epochs is not None),),
    **dict.fromkeys(("train.method", "train.epochs", "train.tokens_per_step", "train.microbatches"), _ALWAYS),
    "train.round_microbatches": (
        (
            "a step has no more microbatches",
            lambda case: (
                (case.config.train.round_microbatches or 1) >= (case.config.train.microbatches or 2**63)
            ),
        ),
        *_REPLICATED,
        *_TRAINERS,
    ),
    "train.objective": _ALWAYS,
    "train.beta": (
        (
            "train.objective has no such weight",
            lambda case: not case.learns("dpo", "orpo", "kto", "distill"),
        ),
    ),
    "train.temperature": (
        ("train.objective has no temperature", lambda case: not case.learns("embed", "distill")),
    ),
    "train.teacher": (("train.objective is not distill", lambda case: not case.learns("distill")),),
    "train.loss": _TRAINERS,
    **dict.fromkeys(("train.seed", "train.run_dir", "train.mlp_parts"), _ALWAYS),
    **dict.fromkeys(("train.neftune_noise_alpha", "train.loss_function"), _ALWAYS),
    **dict.fromkeys(("train.save_minutes", "train.on_nonfinite", "train.deterministic"), _ALWAYS),
    "train.head_chunk_tokens": (
        ("train.loss is model", lambda case: case.config.train.loss == "model"),
        ("train.loss_function is given", lambda case: case.config.train.loss_function is not None),
        ("the loss of this model is its own", lambda case: case.around.chunks_loss is False),
        *_REPLICATED,
        *_TRAINERS,
    ),
    "train.save_every": (
        (
            "the run ends before, and saves at its end",
            lambda case: case.config.train.save_every >= case.config.train.steps,
        ),
    ),
    "train.save_total_limit": (("only the end is saved", _Case.saves_once),),
    "train.resume": (
        (
            "without train.run_dir every run is a new one",
            lambda case: case.config.train.resume == "auto" and case.config.train.run_dir is None,
        ),
    ),
    "train.profile_steps": (
        ("the first two steps are not recorded", lambda case: case.config.train.steps <= 2),
        *_TRAINERS,
    ),
    "train.on_stall": _TRAINERS,
    **dict.fromkeys(("train.stall_factor", "train.stall_floor_s"), (*_NO_STALL, *_TRAINERS)),
    **dict.fromkeys(("eval.data", "eval.split"), _ALWAYS),
    **dict.fromkeys(("eval.every", "eval.sequences", "eval.keep_best", "eval.patience"), _NO_EVALUATION),
    **dict.fromkeys(("lora.r", "lora.lora_alpha", "lora.lora_dropout", "lora.target_modules"), _FULL),
    **dict.fromkeys(("lora.exclude_modules", "lora.bias", "lora.use_rslora", "lora.modules_to_save"), _FULL),
    **dict.fromkeys(("lora.init_lora_weights", "lora.rank_pattern", "lora.alpha_pattern"), _FULL),
    **dict.fromkeys(("lora.layers_to_transform", "lora.layers_pattern", "lora.fan_in_fan_out"), _FULL),
    **dict.fromkeys(("lora.from", "lora.base_codec", "lora.table_codec", "lora.target_parameters"), _FULL),
    **{f"optimizer.{key}": row for key, row in _OPTIMIZER.items()},
    **dict.fromkeys(("memory.device", "memory.device_memory"), _ALWAYS),
    **dict.fromkeys(("memory.home", "memory.host_memory", "memory.activations"), _REPLICATED),
    **dict.fromkeys(("memory.disk_memory", "memory.store_dir"), _HOST_HOME),
    "memory.commits": (*_HOST_HOME, *_TRAINERS),
    **dict.fromkeys(("memory.slots", "memory.prefetch", "memory.offload"), _STAGES),
    "memory.tile_elements": (
        ("the home is in host memory", lambda case: case.home == "host" and case.has_global_norm()),
        *_REPLICATED,
    ),
    "memory.numa": (
        ("this machine has one NUMA node", lambda case: (case.around.num_numa_nodes or 2) < 2),
        *_TRAINERS,
    ),
    "memory.link_gb_per_s": (
        ("only emulated devices have a throttled link", lambda case: not case.is_emulated()),
        *_REPLICATED,
    ),
    "memory.peer_gb_per_s": (
        (
            "only emulated devices copy to each other as fast as one likes",
            lambda case: not (case.is_emulated() and case.has_several_workers()),
        ),
        *_REPLICATED,
    ),
    **dict.fromkeys(("transport.weights", "transport.gradients"), _REPLICATED),
    "transport.activations": (
        (
            "memory.offload is false",
            lambda case: case.config.memory.offload is False and not case.has_several_workers(),
        ),
        *_REPLICATED,
    ),
    **dict.fromkeys(("parallel.mode", "parallel.timeout_s"), _ALONE),
    **dict.fromkeys(("parallel.gradients", "parallel.weights"), (*_ALONE, *_REPLICATED)),
    "parallel.handover": (
        ("one device hands nothing over", lambda case: not case.has_several_workers()),
        *_REPLICATED,
        *_TRAINERS,
    ),
    **dict.fromkeys(("parallel.ddp_bucket_mib", "parallel.ddp_static_graph"), _ONLY_DDP),
    **dict.fromkeys(("parallel.ddp_find_unused", "parallel.ddp_compress"), _ONLY_DDP),
    "parallel.ddp_powersgd_rank": (
        *_ONLY_DDP,
        (
            "parallel.ddp_compress is not powersgd",
            lambda case: case.config.parallel.ddp_compress != "powersgd",
        ),
    ),
    "telemetry.writers": _ALWAYS,
    "telemetry.project": (
        *_NO_WRITERS,
        (
            "neither wandb nor trackio is among telemetry.writers",
            lambda case: not {"wandb", "trackio"} & set(case.config.telemetry.writers),
        ),
    ),
    "telemetry.every": _NO_WRITERS,
}


def settings_without_effect(config: "Config", around: Surroundings) -> list[str]:
    """Return one sentence per setting that differs from its default and changes nothing in this run."""
    case = _Case(config, around)
    found = []
    for key, row in NO_EFFECT.items():
        why = next((reason for reason, holds in row if holds(case)), None)
        if why is not None and _is_set(config, key):
            found.append(f"{key} has no effect: {why}")
    return found


def _is_set(config: "Config", key: str) -> bool:
    section_name, _, name = key.partition(".")
    section = getattr(config, section_name)
    return bool(getattr(section, name) != type(section).model_fields[name].default)
