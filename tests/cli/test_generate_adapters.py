"""Adapters under ``outsize generate``: the tokenizer and template beside them, the model that they stand in."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cli.command_line import status_of
from outsize.errors import CheckpointError, ConfigError
from outsize.functions import export
from outsize.training.run import train
from support import make_model_dir, make_run

pytestmark = pytest.mark.filterwarnings("ignore")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}"
)
run = partial(status_of, "generate")
SHARED = ["--max-new-tokens", 3, "--home", "host", "--device", "cpu", "--device-memory", "64MiB", "--json"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has no template."""
    return make_model_dir(tmp_path_factory.mktemp("base") / "llama", "llama")


def adapters(base: Path, directory: Path, num_rows: int | None = None) -> Any:
    """Write adapters of ``base``; returns PEFT's model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    if num_rows is not None:
        model.resize_token_embeddings(num_rows, mean_resizing=False)
    made = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1 * parameter.requires_grad)
    made.save_pretrained(directory)
    return made.eval()


def said(capsys: Any) -> dict[str, Any]:
    (one,) = json.loads(capsys.readouterr().out)["written"]
    return one


@pytest.mark.parametrize("alone", [False, True])
def test_the_template_beside_adapters_goes_before_the_models(
    alone: bool, base: Path, tmp_path: Path, capsys: Any
):
    """Beside a tokenizer, or without one."""
    adapters(base, tmp_path / "adapters")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "adapters")
    if alone:
        for path in (tmp_path / "adapters").glob("tokenizer*"):
            path.unlink()
    assert run(tmp_path / "adapters", "--chat", "--prompt", "Hi", *SHARED) == 0
    assert said(capsys)["prompt"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_tokens_that_were_added_with_the_adapters_are_read_and_written(
    base: Path, tmp_path: Path, capsys: Any
):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([f"<new {number}>" for number in range(20)])
    tokenizer.save_pretrained(tmp_path / "adapters")
    model = adapters(base, tmp_path / "adapters", num_rows=len(tokenizer) + 3)
    assert run(tmp_path / "adapters", "--prompt", "a<new 19>", *SHARED) == 0
    ids = torch.tensor([tokenizer("a<new 19>")["input_ids"]])
    assert int(ids.max()) > 264
    written = model.generate(input_ids=ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :]
    assert said(capsys)["text"] == tokenizer.decode(written, skip_special_tokens=True)


def test_the_model_of_adapters_can_be_said(base: Path, tmp_path: Path, capsys: Any):
    adapters(base, tmp_path / "adapters")
    assert run(tmp_path / "adapters", "--prompt", "ab", *SHARED) == 0
    text = said(capsys)["text"]
    path = tmp_path / "adapters" / "adapter_config.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({**entries, "base_model_name_or_path": "/workspace/models/llama"}))
    assert run(tmp_path / "adapters", "--prompt", "ab", *SHARED) != 0
    assert "adapter_config.json names /workspace/models/llama" in capsys.readouterr().err
    assert run(tmp_path / "adapters", "--base", base, "--prompt", "ab", *SHARED) == 0
    assert said(capsys)["text"] == text
    assert run(base, "--base", base, "--prompt", "ab", *SHARED) == 2
    assert "holds none; leave it out" in capsys.readouterr().err


def test_adapters_are_merged_into_a_model_that_has_moved(tmp_path: Path):
    config = make_run(tmp_path, train={"method": "lora", "steps": 1})
    train(config)
    want = export(tmp_path / "run", tmp_path / "before", merge=True)
    shutil.move(tmp_path / "model", tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"adapter_config.json names .*model.*--base"):
        export(tmp_path / "run", tmp_path / "merged", merge=True)
    with pytest.raises(ConfigError, match="merge"):
        export(tmp_path / "run", tmp_path / "merged", base=str(tmp_path / "moved"))
    merged = export(tmp_path / "run", tmp_path / "merged", merge=True, base=str(tmp_path / "moved"))
    found, before = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (merged, want))
    assert all(torch.equal(found[name], value) for name, value in before.items())
