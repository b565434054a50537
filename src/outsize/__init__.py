"""Train and run language models larger than the memory of the device that computes them.

Importing this package starts no thread, opens no file, touches no GPU and does not import torch. It says in the
environment how long threads of OpenMP spin and how cuBLAS repeats its bits, where nothing says so yet, since both are
read once.
"""

from typing import TYPE_CHECKING, Any

from outsize.errors import (
    BudgetExceededError,
    CheckpointError,
    CodecError,
    ConfigError,
    DataError,
    ExecutionError,
    InfeasiblePlanError,
    LostRankError,
    ModelError,
    NonFiniteError,
    OutsizeError,
    ProgramError,
    StalledError,
    StorageError,
)
from outsize.spin import limit_spinning, repeat_products

if TYPE_CHECKING:
    from outsize.cli.plan.plan_generate import predict
    from outsize.config import Config
    from outsize.functions import export, plan, probe, report, train, verify
    from outsize.wrapped.api import load, unwrap, wrap
    from outsize.wrapped.optimizer import AdamW, clip_grad_norm_
    from outsize.wrapped.writing.generations import generate
    from outsize.wrapped.writing.scoring import score

__version__ = "0.2.0"

__all__ = [
    "AdamW",
    "BudgetExceededError",
    "CheckpointError",
    "CodecError",
    "Config",
    "ConfigError",
    "DataError",
    "ExecutionError",
    "InfeasiblePlanError",
    "LostRankError",
    "ModelError",
    "NonFiniteError",
    "OutsizeError",
    "ProgramError",
    "StalledError",
    "StorageError",
    "clip_grad_norm_",
    "export",
    "generate",
    "load",
    "plan",
    "predict",
    "probe",
    "report",
    "score",
    "train",
    "unwrap",
    "verify",
    "wrap",
]

# What needs torch comes with the first use of its name.
_LATER = {
    **dict.fromkeys(("export", "plan", "probe", "report", "train", "verify"), "outsize.functions"),
    "Config": "outsize.config",
    "AdamW": "outsize.wrapped.optimizer",
    "clip_grad_norm_": "outsize.wrapped.optimizer",
    "load": "outsize.wrapped.api",
    "predict": "outsize.cli.plan.plan_generate",
    "generate": "outsize.wrapped.writing.generations",
    "score": "outsize.wrapped.writing.scoring",
    "unwrap": "outsize.wrapped.api",
    "wrap": "outsize.wrapped.api",
}


limit_spinning()
repeat_products()


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__
