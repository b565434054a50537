"""What every runner shares: the arguments, the measurement, and the JSON object it ends with.

A runner is a script that imports its peer first and then starts a ``Recorder``. The order matters for the
memory figures: what is imported before the recorder starts counts as the libraries' own weight, what comes
after counts as training.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers
from common import Usage, finish, peak_rss_bytes, reset_peak_rss, rss_bytes, version_of

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""The optimizer of every runner. No runner clips gradients."""

COMPILED = "compiled"
"""The variant of a runner whose blocks are compiled by ``torch.compile``, each by itself."""

Step = Callable[[Sequence[torch.Tensor]], float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a runner is asked to train."""

    model: Path
    """A Hugging Face model directory with fp32 weights."""
    data: Path
    """The directory of ``prepare.py``, with ``tokens.npy`` and ``batches.npz``."""
    steps: int
    warmup: int
    """Leading steps that are run and reported but do not count."""
    run_dir: Path
    """An empty directory for whatever the peer writes."""
    threads: int
    option: str
    """The variant of the runner, e.g. ``no-checkpointing``."""
    device_memory: str
    """Budget of the streamed runners, e.g. ``128MiB``; the others have no such setting."""

    @classmethod
    def from_arguments(cls) -> "Job":
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", type=Path, required=True)
        parser.add_argument("--data", type=Path, required=True)
        parser.add_argument("--steps", type=int, default=6)
        parser.add_argument("--warmup", type=int, default=2)
        parser.add_argument("--run-dir", type=Path, required=True)
        parser.add_argument("--threads", type=int, default=2)
        parser.add_argument("--option", default="")
        parser.add_argument("--device-memory", default="256MiB")
        job = cls(**vars(parser.parse_args()))
        job.run_dir.mkdir(parents=True, exist_ok=True)
        return job

    def input_ids(self) -> torch.Tensor:
        """Return the token ids of all steps, shape [step, microbatch, sequence, position]."""
        with np.load(self.data / "batches.npz") as arrays:
            return torch.from_numpy(arrays["input_ids"].astype(np.int64))


class Recorder:
    """Notes what each step took. Starting one fixes the memory baseline."""

    def __init__(self, job: Job) -> None:
        self._job = job
        torch.set_num_threads(job.threads)
        torch.manual_seed(0)
        # Transformers imports a model's module when it is first asked for: libraries, not training.
        importlib.import_module("transformers.models.llama.modeling_llama")
        self._imported_bytes = rss_bytes()
        self._started_s = time.perf_counter()
        self._mark = Usage.now()
        self._setup: dict[str, Any] = {}
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._usages: list[dict[str, Any]] = []
        self._peak_before_bytes = 0
        self._peak_was_reset = False

    def ready(self) -> None:
        """The model stands; what was used so far was preparation."""
        self._setup = {"seconds": time.perf_counter() - self._started_s, **self._since_mark()}

    def step(self, loss: float, seconds: float) -> None:
        """A step is done; its peer says how long it took."""
        self._losses.append(loss)
        self._seconds.append(seconds)
        self._usages.append(self._since_mark())
        if len(self._losses) == self._job.warmup:
            # The kernel keeps one high-water mark; from here on it is that of the steady state.
            self._peak_before_bytes, self._peak_was_reset = peak_rss_bytes(), reset_peak_rss()

    def finish(self, **facts: Any) -> None:
        """Print the measurement; ``facts`` are added to it."""
        steady_bytes = peak_rss_bytes()
        finish(
            {
                "losses": self._losses,
                "seconds": self._seconds,
                "usage": self._usages,
                "setup": self._setup,
                "warmup": self._job.warmup,
                "imported_rss_bytes": self._imported_bytes,
                "peak_rss_bytes": max(self._peak_before_bytes, steady_bytes),
                "steady_peak_rss_bytes": steady_bytes if self._peak_was_reset else None,
                "versions": {name: version_of(name) for name in ("torch", "transformers", "deepspeed")},
                **facts,
            }
        )

    def _since_mark(self) -> dict[str, Any]:
        former, self._mark = self._mark, Usage.now()
        return (self._mark - former).as_dict()


def run(build: Callable[[Job], Step], **facts: Any) -> None:
    """Measure a runner whose ``build`` returns a function that trains one step and returns its mean loss."""
    job = Job.from_arguments()
    input_ids = job.input_ids()[: job.steps]
    recorder = Recorder(job)
    step = build(job)
    recorder.ready()
    for microbatches in input_ids:
        started = time.perf_counter()
        loss = step(list(microbatches))
        recorder.step(loss, time.perf_counter() - started)
    recorder.finish(**facts)


def load_model(job: Job, *, checkpointing: bool = True, reentrant: bool = False) -> Any:
    """Return the job's model in fp32, ready to train, with activation checkpointing per block where asked.

    Blocks of the variant ``compiled`` are compiled within their checkpoints.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.config.use_cache = False
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if job.option == COMPILED:
        for block in model.model.layers:
            block.compile()
    return model


def plain_step(model: Any, optimizer: torch.optim.Optimizer) -> Step:
    """Return the plain PyTorch step: every microbatch forward and backward, then one optimizer step.

    Microbatches are equally long, so the mean of their losses is the token-weighted mean.
    """

    def step(microbatches: Sequence[torch.Tensor]) -> float:
        total = 0.0
        for input_ids in microbatches:
            loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss / len(microbatches)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step
