"""Models that are not there, counted for tests: once for all processes of a run, in its own cache."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from outsize.config import parse_config
from outsize.runtime.trial.counts import Counts
from outsize.session.job import known_models


def counted(hf_config: Mapping[str, Any], dtype: str = "bf16", **settings: Any) -> Counts:
    """Return what a model takes; ``settings`` are ``kernels``, ``mlp_parts``, ``freeze``, ``lora``, ``seq_len``."""
    return _counted(json.dumps([hf_config, settings], sort_keys=True, default=str), dtype)


@cache
def _counted(asked: str, dtype: str) -> Counts:
    hf_config, settings = json.loads(asked)
    lora = settings.get("lora")
    run = parse_config(
        {
            "model": {
                "path": "unused",
                "dtype": dtype,
                "kernels": settings.get("kernels", "none"),
                "freeze": settings.get("freeze", ()),
            },
            "data": {"path": "unused", "seq_len": settings.get("seq_len", 1024)},
            "train": {
                "tokens_per_step": settings.get("seq_len", 1024),
                "mlp_parts": settings.get("mlp_parts", 1),
                "method": "full" if lora is None else "lora",
            },
            **({} if lora is None else {"lora": lora}),
        }
    )
    return known_models.counted(hf_config, run)
