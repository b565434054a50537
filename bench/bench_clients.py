"""Do clients of OpenAI's interface get from ``outsize serve`` what they ask for?

A tiny model learns three replies by heart: a greeting with characters of several bytes, a call of a tool, and an answer
to its result. It is served as users serve theirs, from disk under a budget, and each client asks for all in turn.

    pip install litellm langchain-openai llm
    npm install --prefix /tmp/npm openai ai @ai-sdk/openai-compatible
    python bench/bench_clients.py --npm /tmp/npm     # half a minute
"""

import argparse
import importlib.metadata
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import clients
import common

HERE = Path(__file__).parent
NPM = ("openai", "ai-sdk")
TEMPLATE = (
    "{% for t in tools or [] %}<|im_start|>tool {{ t.function.name }}<|im_end|>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(directory: Path) -> Path:
    """Write a model that has learnt the three replies, and its tokenizer with their template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = ["<|im_end|>", "<|im_start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = TEMPLATE
    arguments = {"function": {"name": "add", "arguments": clients.ARGUMENTS}}
    talks = [
        ([*clients.HELLO, {"role": "assistant", "content": clients.REPLY}], None),
        ([*clients.SUM, {"role": "assistant", "tool_calls": [arguments]}], [clients.ADD]),
        (
            [
                *clients.SUM,
                {"role": "assistant", "tool_calls": [arguments]},
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": clients.ANSWER},
            ],
            [clients.ADD],
        ),
    ]
    rows = [
        tokenizer.apply_chat_template(talk, tools=tools, tokenize=True)["input_ids"] for talk, tools in talks
    ]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    labels = torch.tensor([row + [-100] * (length - len(row)) for row in rows])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=4096, eos_token_id=0, pad_token_id=0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(200):
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.02:
            break
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def serve(directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server, and return it with its address once it answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    where = [
        "--device",
        "cpu",
        "--home",
        "disk",
        "--device-memory",
        "8MiB",
        "--dtype",
        "fp32",
        "--port",
        str(port),
    ]
    server = subprocess.Popen([sys.executable, "-m", "outsize", "serve", str(directory), *where])
    url = f"http://127.0.0.1:{port}/v1"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/models")
            break
        except OSError:
            if server.poll() is not None:
                raise
            time.sleep(0.1)
    return server, url


def asked(command: list[str], folder: Path | None = None) -> dict[str, str]:
    told = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300, check=False)
    return common.last_json(told.stdout) or dict.fromkeys(clients.FEATURES, told.stderr[-300:])


def versions(args: argparse.Namespace) -> dict[str, Any]:
    """Of the clients that asked."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    names = [name for name in clients.CLIENTS if name != "curl"]
    python = subprocess.run([args.python, "-c", code, *names], capture_output=True, text=True, check=False)
    packages = ("openai", "ai", "@ai-sdk/openai-compatible") if args.npm else ()
    npm = {
        name: json.loads((args.npm / "node_modules" / name / "package.json").read_text())["version"]
        for name in packages
    }
    return {"versions": {"python": dict(zip(names, python.stdout.split(), strict=False)), "npm": npm}}


def main() -> None:
    """Have every client that is installed ask, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="that has the clients of Python")
    parser.add_argument("--npm", type=Path, help="folder with node_modules")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        server, url = serve(make_model(Path(place)))
        try:
            rows = {
                name: asked([args.python, str(HERE / "clients.py"), url, name]) for name in clients.CLIENTS
            }
            for name in NPM if args.npm else ():
                rows[f"{name} (npm)"] = asked(["node", str(HERE / "clients.mjs"), url, name], args.npm)
        finally:
            server.terminate()
            server.wait()
    table = [[name, *(row.get(feature, "-") for feature in clients.FEATURES)] for name, row in rows.items()]
    common.print_table(["client", *clients.FEATURES], table, "what clients get")
    met = all(value in ("ok", "-") for row in rows.values() for value in row.values())
    common.finish(
        {"clients": rows, "met": met, "outsize": importlib.metadata.version("outsize"), **versions(args)},
        args.output,
    )


if __name__ == "__main__":
    main()
