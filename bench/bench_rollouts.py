"""What do rollouts of GRPO cost over streamed weights, and how does that fall with the number of texts at once?

TRL generates the completions of a whole optimizer step in one call of `generate`, so all of them share each load of the
weights: a wave. What is left is one visit to all weights for each token of the longest completion, against two to
four for the update itself. The model trains all its weights from disk, and generates with the same ones.

    python bench/bench_rollouts.py                   # 36M parameters, 8 and 32 texts of 8 and 32 tokens: 4 minutes
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

PROMPT_TOKENS = 16


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, "<unk>": 1, **{f"w{number}": number + 2 for number in range(2046)}}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>")


def measured(texts: int, tokens: int, steps: int, directory: Path) -> dict[str, Any]:
    """Train with GRPO, and return what generating took of the steps behind the first."""
    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    import outsize
    from outsize.wrapped.module import runner_of

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=128, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = outsize.wrap(
        LlamaForCausalLM(config),
        home="disk",
        store_dir=directory,
        device="cpu",
        device_memory="96MiB",
        microbatches=4,
    )
    runner, plain = runner_of(model), type(model).generate
    rollouts: list[tuple[float, float, int]] = []

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, began = runner.inference_statistics(), time.perf_counter()
        output = plain(self, *args, **{**kwargs, "min_new_tokens": tokens})
        now = runner.inference_statistics()
        assert now is not None
        moved, passes = (
            getattr(now, n) - (getattr(before, n) if before else 0) for n in ("bytes_moved", "num_passes")
        )
        rollouts.append((time.perf_counter() - began, moved, passes))
        return output

    type(model).generate = generate
    prompt = " ".join(f"w{number}" for number in range(PROMPT_TOKENS))
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            str(directory / "run"), max_steps=steps, per_device_train_batch_size=texts, num_generations=4,
            max_completion_length=tokens, beta=0.0, learning_rate=1e-5, bf16=False, gradient_checkpointing=False,
            save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True, logging_strategy="no",
        ),
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        train_dataset=Dataset.from_list([{"prompt": prompt}] * texts * steps),
        processing_class=make_tokenizer(),
    )  # fmt: skip
    times: list[float] = []

    def step(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return training_step(*args, **kwargs)
        finally:
            times.append(time.perf_counter() - began)

    training_step, trainer.training_step = trainer.training_step, step
    trainer.train()
    runner.close()
    seconds, moved, passes = (sum(column) / (steps - 1) for column in zip(*rollouts[1:], strict=True))
    step_s = sum(times[1:]) / (steps - 1)
    return {
        "texts": texts, "tokens": tokens, "generate_s": seconds, "update_s": step_s - seconds,
        "share": seconds / step_s, "passes": passes, "bytes_per_token_pass": moved / passes,
        "tokens_per_s": texts * tokens / seconds,
    }  # fmt: skip


def main() -> None:
    """Measure each number of texts and tokens, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--steps", type=common.steps_above(1), default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for texts in args.texts:
            for tokens in args.tokens:
                with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(sys.stderr):
                    rows.append(measured(texts, tokens, args.steps, Path(directory)))
    columns = ("texts", "tokens", "generate_s", "update_s", "share", "passes", "tokens_per_s")
    common.print_table(
        columns, [[row[name] for name in columns] for row in rows], "GRPO over weights on disk"
    )
    machine = {**common.machine(), "load_1min": os.getloadavg()[0]}
    common.finish({"rows": rows, "machine": machine}, args.output)


if __name__ == "__main__":
    main()
