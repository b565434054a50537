"""How much processor time does a question of ``outsize plan`` take? Each has a process of its own, imports included.

One and eight GPUs, homes on the host and on disk, LoRA, long sequences, 70B to 405B on small cards, with what would
help and without. All of it takes some two minutes of one core.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import model_configs
from common import finish, machine, print_table

MODELS = {
    "llama-8b": model_configs.MODELS["Llama-3.1-8B"],
    "qwen3-8b": model_configs.MODELS["Qwen3-8B"],
    "qwen2.5-14b": model_configs.MODELS["Qwen2.5-14B"],
    "llama-70b": model_configs.MODELS["Llama-3.1-70B"],
    "llama-405b": model_configs.MODELS["Llama-3.1-405B"],
    "qwen3-235b": model_configs.MODELS["Qwen3-235B-A22B"],
}
QUESTIONS = (
    "llama-8b --gpus 4090",
    "llama-8b --gpus 4090 --ram 64GB",
    "llama-8b --gpus 4090 --ram 256GB",
    "llama-8b --gpus 4090 --ram 256GB --seq-len 16384 --tokens-per-step 262144",
    "llama-8b --gpus 4090 --method lora",
    "llama-8b --gpus h100",
    "llama-8b --gpus 2x4090 --ram 256GB",
    "llama-8b --gpus 8x4090",
    "llama-8b --gpus 8xh100",
    "qwen2.5-14b --gpus 4090 --ram 512GB",
    "qwen3-8b --gpus 8x4090",
    "qwen2.5-14b --gpus 4x4090 --ram 512GB",
    "qwen3-235b --gpus 8x4090 --method lora --lora-modules q_proj,v_proj --ram 768GB",
    "llama-70b --gpus b580 --method lora",
    "llama-70b --gpus 3060 --disk 4TB",
    "llama-405b --gpus 4090 --method lora",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="questions that contain this")
    parser.add_argument("--repeats", type=int, default=2, help="times that each is asked; the least is told")
    parser.add_argument("--output", type=Path, help="keep the result here")
    options = parser.parse_args()
    asked = [question for question in QUESTIONS if not options.only or options.only in question]
    if not asked or options.repeats < 1:
        parser.error("no question is asked; --only takes a part of one, --repeats at least 1")
    result: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            (Path(folder) / f"{name}.json").write_text(json.dumps(config))
        for question in asked:
            result[question] = {
                f"{kind}_s": min(processor_s(Path(folder), question, flag) for _ in range(options.repeats))
                for kind, flag in (("without_advice", "--no-advice"), ("with_advice", "--advice"))
            }
    rows = [
        (question, f"{found['without_advice_s']:.1f}", f"{found['with_advice_s']:.1f}")
        for question, found in result.items()
    ]
    print_table(("question", "without advice", "with advice"), rows, "Processor time, seconds")
    worst = {
        kind: max(found[kind] for found in result.values()) for kind in ("without_advice_s", "with_advice_s")
    }
    finish({"bench": "plan_time", "worst": worst, "questions": result, "machine": machine()}, options.output)


def processor_s(folder: Path, question: str, flag: str) -> float:
    """Return the seconds of processor time, user and system, that a process takes to answer ``question``."""
    name, *flags = question.split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "outsize", "plan", str(folder / f"{name}.json"), *flags, flag]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
