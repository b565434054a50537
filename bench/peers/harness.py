"""What every runner shares: the arguments, the loop that is measured, and the JSON object it ends with.

A runner is a script that imports its peer, then calls ``run(name, build)``. ``build`` makes the model ready and
returns a function that trains one step on the given microbatches and returns the mean loss. The order matters for
the memory figures: what is imported before ``run`` counts as the libraries' own weight, what ``build`` does counts
as training.
"""

import argparse
import random
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

Step = Callable[[Sequence[torch.Tensor]], float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a runner is asked to train."""

    model: Path
    """A Hugging Face model directory with fp32 weights."""
    batches: Path
    """An .npz with ``input_ids`` of shape [step, microbatch, sequence, position]."""
    steps: int
    warmup: int
    """Leading steps that are run and reported but do not count."""
    run_dir: Path
    """An empty directory for whatever the peer writes."""
    threads: int
    option: str
    """The variant of the runner, e.g. ``tight``."""

    @classmethod
    def from_arguments(cls) -> "Job":
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", type=Path, required=True)
        parser.add_argument("--batches", type=Path, required=True)
        parser.add_argument("--steps", type=int, default=6)
        parser.add_argument("--warmup", type=int, default=2)
        parser.add_argument("--run-dir", type=Path, required=True)
        parser.add_argument("--threads", type=int, default=2)
        parser.add_argument("--option", default="")
        return cls(**vars(parser.parse_args()))

    def input_ids(self) -> torch.Tensor:
        """Return the token ids of the whole job, shape [step, microbatch, sequence, position]."""
        with np.load(self.batches) as arrays:
            return torch.from_numpy(arrays["input_ids"].astype(np.int64))

    @property
    def num_microbatches(self) -> int:
        return int(self.input_ids().shape[1])


def run(name: str, build: Callable[[Job], Step], **facts: Any) -> None:
    """Build, train and print the measurement of one runner; ``facts`` are added to the printed object."""
    job = Job.from_arguments()
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    random.seed(0)
    job.run_dir.mkdir(parents=True, exist_ok=True)
    input_ids = job.input_ids()
    baseline_bytes = rss_bytes()

    started, before = time.perf_counter(), Usage.now()
    step = build(job)
    setup_s, setup = time.perf_counter() - started, Usage.now() - before

    seconds, losses, usages = [], [], [Usage.now()]
    peak_before_bytes, resettable = 0, False
    for index in range(job.steps):
        if index == job.warmup:
            peak_before_bytes, resettable = peak_rss_bytes(), reset_peak_rss()
        started = time.perf_counter()
        losses.append(step(list(input_ids[index])))
        seconds.append(time.perf_counter() - started)
        usages.append(Usage.now())
    peak_steady_bytes = peak_rss_bytes()
    finish(
        {
            "name": name,
            "steps": job.steps,
            "warmup": job.warmup,
            "losses": losses,
            "seconds": seconds,
            "usage": [(later - sooner).as_dict() for sooner, later in zip(usages, usages[1:], strict=False)],
            "setup": {"seconds": setup_s, **setup.as_dict()},
            "imported_rss_bytes": baseline_bytes,
            "peak_rss_bytes": max(peak_before_bytes, peak_steady_bytes),
            "steady_peak_rss_bytes": peak_steady_bytes if resettable else None,
            "tokens_per_step": int(input_ids[0].numel()),
            "versions": {package: version_of(package) for package in ("torch", "transformers", "deepspeed")},
            **facts,
        }
    )


def load_model(job: Job, *, checkpointing: bool = True) -> Any:
    """Return the job's model in fp32, ready to train, with activation checkpointing per block where asked."""
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32)
    model.config.use_cache = False
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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
