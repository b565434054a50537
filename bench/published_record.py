"""Published runs, and what this project's planner says of each: the rows of ``published.csv``.

A row is planned as ``outsize plan`` would plan it, with these differences, which are of the system and not of the
row: the kernels are the system's (``fused`` or ``eager``), linear layers multiply in fp8 where that is the dtype;
moments are bf16 where the system's are; an optimizer that works on the GPU, or hidden behind compute, is
``streamed``, one that runs when the backward is over and before anything else is ``after``: then all blocks are
recomputed, too, as those systems do, and where that is all that is different it is ``recomputed``. Nothing is fitted to
a row. Rows that accumulate in fp16, which nothing here does, are left out.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outsize.cli.plan.plan_model import AskedModel
from outsize.cli.plan.plan_options import PlanFlags
from outsize.cli.plan.plan_question import ask
from outsize.hardware.machine_spec import Figure
from outsize.planner.predict.decision_search import decide
from outsize.planner.predict.prediction import Prediction, predict
from outsize.planner.predict.question import Question

RECORD = Path(__file__).with_name("published.csv")
_QWEN25 = {"model_type": "qwen2", "max_position_embeddings": 32768}
_LLAMA3 = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def _qwen25(hidden: int, layers: int, heads: int, kv: int, mlp: int, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    vocabulary = {"vocab_size": 151936 if tied else 152064, "tie_word_embeddings": tied}
    return {**_QWEN25, **sizes, **vocabulary, "num_key_value_heads": kv, "intermediate_size": mlp}


MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-0.5B": _qwen25(896, 24, 14, 2, 4864, tied=True),
    "Qwen2.5-1.5B": _qwen25(1536, 28, 12, 2, 8960, tied=True),
    "Qwen2.5-3B": _qwen25(2048, 36, 16, 2, 11008, tied=True),
    "Qwen2.5-7B": _qwen25(3584, 28, 28, 4, 18944, tied=False),
    "Qwen2.5-14B": _qwen25(5120, 48, 40, 8, 13824, tied=False),
    "Qwen2.5-32B": _qwen25(5120, 64, 40, 8, 27648, tied=False),
    "Llama-3-8B": _LLAMA3,
    "Llama-3.1-8B": _LLAMA3,
    "Qwen3-8B": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    **json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8")),
}


@dataclass(frozen=True)
class Answer:
    """What is said of a row.

    Attributes:
        tokens_per_s: predicted.
        low: end of the interval.
        high: end of the interval.
        rounds: that the step is planned in.
    """

    tokens_per_s: float
    low: float
    high: float
    rounds: int


def rows() -> Iterator[Mapping[str, str]]:
    """Read the record."""
    with RECORD.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def answer(row: Mapping[str, str]) -> Answer:
    """Return what the planner says of a row.

    Raises:
        InfeasiblePlanError: no plan fits.
    """
    question = _question(row)
    if row["optimizer"] == "after":
        return _one_after_the_other(question)
    if row["optimizer"] == "recomputed":
        question = _recomputed(question)
    done = predict(decide(question))
    return _answer(question, done, done.step_s)


def _question(row: Mapping[str, str]) -> Question:
    fp8 = row["dtype"] == "fp8"
    words = row["options"].split()
    others = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    whole = {name: int(value) for name, value in others.items() if value.isdigit()}
    options = PlanFlags(
        model=row["model"],
        gpus=row["gpus"] or None,
        kernels=row["kernels"],  # type: ignore[arg-type]
        dtype="bf16" if fp8 else row["dtype"],  # type: ignore[arg-type]
        products="fp8" if fp8 else "native",
        seq_len=int(row["seq_len"]),
        tokens_per_step=int(row["tokens_per_step"]),
        **{"device_memory": f"{row['device_gib']}GiB" if row["device_gib"] else None, **others, **whole},  # type: ignore[arg-type]
        ram=row["host"] or None,
        optimizer_state="bf16" if row["system"] in ("LLMQ", "FlexTrain", "dataflow") else "fp32",
    )
    return ask(options, AskedModel(row["model"], MODELS[row["model"]])).question


def _recomputed(question: Question) -> Question:
    """Return the question of a system that recomputes all blocks, and all of each."""
    counted = question.workload_of
    assert counted is not None

    def in_full(sequences: int) -> Any:
        work = counted(sequences)
        return replace(work, recompute_flops=work.forward_flops)

    return replace(question, workload_of=in_full).deciding(activations="recompute")


def _one_after_the_other(question: Question) -> Answer:
    """Return a step in which all is recomputed, and the optimizer steps behind the backward.

    Until then the optimizer takes no time, and nothing waits for a norm.
    """
    question = _recomputed(question)
    machine = question.machine
    free = Figure(value=1e15, source="left out")
    machine = replace(machine, host=replace(machine.host, adamw_params_per_s=free))
    done = predict(decide(replace(question, machine=machine).deciding(clip=False, unit_clip=False)))
    step_s = done.step_s + question.model.num_trainable / question.machine.host.adamw_params_per_s.value
    return _answer(question, done, step_s)


def _answer(question: Question, done: Prediction, step_s: float) -> Answer:
    tokens_per_s = question.tokens_per_step / step_s
    scale = tokens_per_s / done.tokens_per_s
    low, high = done.interval
    rounds = -(-done.microbatches // done.round_microbatches)
    return Answer(tokens_per_s, low * scale, high * scale, rounds)
