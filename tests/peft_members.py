"""Directories of adapters as PEFT writes them: every kind that it has, every way to begin LoRA, every way of saving."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

IDS = torch.arange(2 * 9).reshape(2, 9) * 7 % 200
TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "qwen2": ["q_proj"],
    "qwen3_moe": ["q_proj", "v_proj"],
    "gpt_oss": ["q_proj"],
    "mixtral": ["q_proj"],
}


def _nothing(model: nn.Module) -> None:
    pass


def _more_rows(model: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model.resize_token_embeddings(280, mean_resizing=False)


@cache
def _read(base: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(base, dtype=dtype)


@dataclass(frozen=True)
class Member:
    """Adapters in a directory.

    Attributes:
        kind: PEFT's name of it.
        settings: of its configuration.
        model: of the zoo.
        change: what a user does to the model before PEFT sees it, when saving and when loading.
        saving: arguments of ``save_pretrained``.
        refused: what the refusal says; None where logits are PEFT's.
    """

    kind: str = "LORA"
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    change: Callable[[Any], None] = _nothing
    saving: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None

    def save(self, base: Path, directory: Path) -> None:
        """Write the adapters, away from where they begin."""
        config_class = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(self.kind)]
        fields = config_class.__dataclass_fields__
        given: dict[str, Any] = {"task_type": "CAUSAL_LM", **self.settings}
        if "target_modules" in fields and self.kind not in ("LN_TUNING", "ADAPTION_PROMPT"):
            given.setdefault("target_modules", TARGETS[self.model])
        if self.kind == "LORA":
            given.setdefault("r", 4)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = peft.get_peft_model(self.plain(base), config_class(**given))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn(parameter.shape) * 0.03)
            model.save_pretrained(directory, **self.saving)

    def loaded(self, base: Path, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
        """PEFT's model of that directory."""
        return peft.PeftModel.from_pretrained(self.plain(base, dtype), directory).eval()

    def logits(self, base: Path, directory: Path, dtype: torch.dtype = torch.float32) -> Tensor:
        """Logits of PEFT's own model of that directory."""
        with torch.no_grad():
            return self.loaded(base, directory, dtype)(input_ids=IDS).logits

    def plain(self, base: Path, dtype: torch.dtype = torch.float32) -> Any:
        """The model, changed as its user changes it."""
        model = copy.deepcopy(_read(base, dtype))
        self.change(model)
        return model


_PROMPT, _ANEW, _CHOOSES = "before a prompt", "computes a part of them anew", "choose anew for each input"
# Settings that make a kind fit models of 32 numbers; what has none is built by default.
_SMALL: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 2},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "CPT": {"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]},
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"feedforward_modules": []},
    "MISS": {"r": 4},
    "OFT": {"oft_block_size": 4, "r": 0},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [1, 5, 7], "target_modules": ["embed_tokens"]},
    "VBLORA": {"num_vectors": 8, "vector_length": 4, "topk": 2},
    "WAVEFT": {"n_frequency": 10},
    **{
        kind: {"num_virtual_tokens": 3}
        for kind in ("CARTRIDGE", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING")
    },
}
_SMALL["MULTITASK_PROMPT_TUNING"]["num_tasks"] = 2
_REFUSED = {
    **dict.fromkeys(("CARTRIDGE", "CPT", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING"), _PROMPT),
    "MULTITASK_PROMPT_TUNING": _PROMPT,
    **dict.fromkeys(("FROD", "OSF", "PSOFT"), _ANEW),
    **dict.fromkeys(("POLY", "XLORA"), _CHOOSES),
    "SHADOW": "not known to compute the same",
}
# What PEFT cannot build here: AdaMSS needs scikit-learn.
UNBUILT = {"ADAMSS"}
# Kinds that PEFT puts around GPT-2's layers, which keep their weights the other way round.
_NAMES = (
    "LORA ADALORA ADAPTION_PROMPT DEFT FOURIERFT GRALORA HIRA IA3 LN_TUNING PVERA RANDLORA TINYLORA "
    "TRAINABLE_TOKENS UNILORA VBLORA VERA WAVEFT"
)
_ON_CONV1D = frozenset(_NAMES.split())
_ON_MOE = ["LORA", "BOFT", "HRA", "IA3", "LOHA", "LOKR", "MISS", "OFT", "VERA", "VBLORA", "SHIRA", "TINYLORA"]


def _kinds() -> dict[str, Member]:
    found = {}
    for kind in (each.value for each in peft.PEFT_TYPE_TO_CONFIG_MAPPING):
        if kind in UNBUILT:
            continue
        settings, refused = _SMALL.get(kind, {}), _REFUSED.get(kind)
        found[f"{kind} llama"] = Member(kind, settings, refused=refused)
        if kind in _ON_CONV1D:
            own = {**settings, "target_modules": ["wte"]} if kind == "TRAINABLE_TOKENS" else settings
            found[f"{kind} gpt2"] = Member(kind, own, "gpt2")
        if kind in _ON_MOE:
            found[f"{kind} qwen3_moe"] = Member(kind, settings, "qwen3_moe")
    return found


KINDS = _kinds()
_EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
_TOKENS = {"trainable_token_indices": [5, 6, 7]}
SETTINGS: dict[str, Member] = {
    **{
        f"begun {how}": Member(settings={"init_lora_weights": how})
        for how in (False, "gaussian", "eva", "orthogonal", "mica", "lora_ga", "pissa", "olora")
    },
    "begun pissa_niter_4": Member(
        settings={"init_lora_weights": "pissa_niter_4"}, refused="init_lora_weights=pissa_niter_4"
    ),
    "pissa, other ranks": Member(settings={"init_lora_weights": "pissa", "rank_pattern": {"down_proj": 2}}),
    "pissa, other way round": Member(
        settings={"init_lora_weights": "pissa", "fan_in_fan_out": True}, model="gpt2"
    ),
    "olora of a mixture": Member(settings={"init_lora_weights": "olora"}, model="qwen3_moe"),
    "dora": Member(settings={"use_dora": True}),
    "dora from pissa": Member(settings={"use_dora": True, "init_lora_weights": "pissa"}),
    "rslora": Member(settings={"use_rslora": True}),
    "qalora": Member(settings={"use_qalora": True, "qalora_group_size": 4}),
    "biases of adapters": Member(settings={"lora_bias": True}),
    "all linear layers": Member(settings={"target_modules": "all-linear"}),
    "a pattern": Member(settings={"target_modules": r".*\.1\..*_proj"}),
    "other ranks and scales": Member(
        settings={"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}}
    ),
    "one layer": Member(settings={"layers_to_transform": [1]}),
    "modules left out": Member(settings={"target_modules": "all-linear", "exclude_modules": ["up_proj"]}),
    "layers again": Member(settings={"layer_replication": [(0, 2), (1, 2)]}),
    "all biases": Member(settings={"bias": "all"}, model="qwen2"),
    "biases of adapted layers": Member(settings={"bias": "lora_only"}, model="gpt2"),
    "experts": Member(settings=_EXPERTS, model="qwen3_moe"),
    "experts of gpt-oss": Member(settings=_EXPERTS, model="gpt_oss"),
    "experts of Mixtral": Member(settings=_EXPERTS, model="mixtral"),
    "for calls": Member(settings={"alora_invocation_tokens": [3, 4]}, refused="alora_invocation_tokens"),
    "truncated": Member(settings={"kasa_config": peft.KasaConfig()}, refused="kasa_config"),
    "no task": Member(settings={"task_type": None}),
    "to classify": Member(settings={"task_type": "SEQ_CLS"}, refused="the task SEQ_CLS"),
    "projections left out": Member("VERA", {"save_projection": False}),
}
_RESIZED = {"change": _more_rows}
WAYS: dict[str, Member] = {
    "head": Member(settings={"modules_to_save": ["lm_head"]}),
    "head and embedding": Member(settings={"modules_to_save": ["lm_head", "embed_tokens"]}),
    "norms": Member(settings={"modules_to_save": ["norm"]}),
    "tied embedding": Member(settings={"modules_to_save": ["wte"]}, model="gpt2"),
    "tied head and embedding": Member(settings={"modules_to_save": ["wte", "lm_head"]}, model="gpt2"),
    "tied, held so": Member(settings={"modules_to_save": ["wte"], "ensure_weight_tying": True}, model="gpt2"),
    "embeddings": Member(saving={"save_embedding_layers": True}),
    "tied embeddings": Member(model="gpt2", saving={"save_embedding_layers": True}),
    "adapted embedding": Member(settings={"target_modules": ["q_proj", "embed_tokens"]}),
    "adapted tied embedding": Member(settings={"target_modules": ["c_attn", "wte"]}, model="gpt2"),
    "adapted embedding and head": Member(settings={"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "resized": Member(**_RESIZED),
    "resized, tied": Member(model="gpt2", **_RESIZED),
    "resized, trained whole": Member(settings={"modules_to_save": ["lm_head", "embed_tokens"]}, **_RESIZED),
    "resized, some tokens": Member(settings={"trainable_token_indices": [270, 271]}, **_RESIZED),
    "resized, embedding adapted": Member(
        settings={"target_modules": ["q_proj", "embed_tokens"]},
        refused="one of the model's two tables",
        **_RESIZED,
    ),
    "some tokens": Member(settings=_TOKENS),
    "some tokens, tied": Member(settings=_TOKENS, model="gpt2"),
    "some tokens, held tied": Member(settings={**_TOKENS, "ensure_weight_tying": True}, model="gpt2"),
    "pickled": Member(saving={"safe_serialization": False}),
}
