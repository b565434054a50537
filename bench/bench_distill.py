"""What does it cost a student that only the largest logits of its teacher were kept, by how many?

The teacher is trained on text; students learn it from the same text by the loss of ``train.objective: distill``, of
nothing but the teacher (beta 1), from the same weights and in the same order. Each is measured on text held out: by the
cross-entropy, and by the divergence from the whole teacher.

    python bench/bench_distill.py --text docs        # 1,024 tokens of BPE, 0.6M and 0.2M parameters: a minute
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import common

VOCABULARY, LENGTH, ROWS = 1024, 64, 16


def sequences_of(folder: Path) -> Any:
    """Tokens of all text in a folder [N, S], in an order of their own."""
    import torch
    from tokenizers import ByteLevelBPETokenizer

    paths = sorted(folder.rglob("*.md"))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(path) for path in paths], vocab_size=VOCABULARY, show_progress=False)
    ids = torch.tensor(tokenizer.encode("\n".join(path.read_text() for path in paths)).ids)
    ids = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]


def make_model(width: int, layers: int) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=LENGTH,
    ))  # fmt: skip


def trained(model: Any, ids: Any, steps: int, loss_of: Any) -> Any:
    """Train a model on batches by numbers of sequences."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    order = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(len(ids), (ROWS,), generator=order)
        loss_of(model, rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def main() -> None:
    """Train the teacher and each student, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=Path("docs"))
    parser.add_argument("--top", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    from outsize.objectives.recipes import distance

    ids = sequences_of(args.text)
    held, ids = ids[: len(ids) // 10], ids[len(ids) // 10 :]
    teacher = trained(
        make_model(128, 2), ids, 2 * args.steps, lambda m, rows: m(ids[rows], labels=ids[rows]).loss
    )
    with torch.no_grad():
        taught = torch.cat([teacher(part).logits[:, :-1] for part in ids.split(64)])
        told = teacher(held).logits[:, :-1].flatten(0, 1)
    rows = []
    for k in [*args.top, None]:
        values, tokens = (taught, None) if k is None else taught.topk(k, -1)
        mass = 1.0 if k is None else float(taught.softmax(-1).gather(-1, tokens).sum(-1).mean())

        def loss(model: Any, numbers: Any, values: Any = values, tokens: Any = tokens) -> Any:
            logits = model(ids[numbers]).logits[:, :-1].flatten(0, 1)
            chosen = None if tokens is None else tokens[numbers].flatten(0, 1)
            return distance(logits, values[numbers].flatten(0, 1), chosen, 1.0)

        student = trained(make_model(64, 1), ids, args.steps, loss)
        with torch.no_grad():
            outputs = student(held, labels=held)
            away = float(distance(outputs.logits[:, :-1].flatten(0, 1), told, None, 1.0))
        rows.append({"k": k or VOCABULARY, "mass": mass, "loss": float(outputs.loss), "from_teacher": away})
    with torch.no_grad():
        loss_of_teacher = float(teacher(held, labels=held).loss)
    names = ("k", "mass", "loss", "from_teacher")
    common.print_table(names, [[row[name] for name in names] for row in rows], "students, text held out")
    common.finish(
        {
            "rows": rows,
            "loss_of_teacher": loss_of_teacher,
            "steps": args.steps,
            "threads": torch.get_num_threads(),
        },
        args.output,
    )


if __name__ == "__main__":
    main()
