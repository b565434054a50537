import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from cli.command_line import status_of
from outsize.training.run import train
from support import make_model_dir, make_run

# Names of a block's weights, in the file too, of those whose rows the converter leaves in their order.
PLAIN = {
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def save_tokenizer(directory: Path) -> None:
    """A tokenizer of bytes in the form of Llama 2's, which llama.cpp takes whatever its words are."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(directory)


def test_an_export_is_written_for_llama_cpp_too_or_refused_before_it_begins(tmp_path: Path, capsys: Any):
    model = make_model_dir(tmp_path / "model", num_hidden_layers=2)
    unknown = (model / "tokenizer.json").read_bytes()
    save_tokenizer(model)
    train(make_run(tmp_path, train={"steps": 1}))
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):  # as beside the weights of many a model
        index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-00001-of-00002.bin"}}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    out, file = tmp_path / "out", tmp_path / "out.gguf"
    assert status_of("export", tmp_path / "run", "--out", out, "--gguf", file, "--json") == 0
    assert json.loads(capsys.readouterr().out)["gguf"] == str(file)
    assert status_of("export", tmp_path / "run", "--out", tmp_path / "again", "--gguf", file) == 2
    assert "exists; name another file" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
    weights = load_file(out / "model.safetensors")
    tensors = GGUFReader(tmp_path / "out.gguf").tensors
    found = {tensor.name: torch.from_numpy(np.array(tensor.data)) for tensor in tensors}
    assert torch.equal(found["token_embd.weight"], weights["model.embed_tokens.weight"])
    for layer in range(2):
        for ours, theirs in PLAIN.items():
            weight = weights[f"model.layers.{layer}.{ours}.weight"]
            assert torch.equal(found[f"blk.{layer}.{theirs}.weight"], weight), ours
        for ours, theirs in {"q_proj": "attn_q", "k_proj": "attn_k"}.items():
            weight = weights[f"model.layers.{layer}.self_attn.{ours}.weight"]
            rows = {tuple(row) for row in found[f"blk.{layer}.{theirs}.weight"].tolist()}
            assert rows == {tuple(row) for row in weight.tolist()}, ours
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/tokenizer.json"):
        path.write_bytes(unknown)
    assert (
        status_of("export", tmp_path / "run", "--out", tmp_path / "late", "--gguf", tmp_path / "no.gguf") == 2
    )
    assert "does not know this model or its tokenizer: " in capsys.readouterr().err
    assert not [*tmp_path.glob("no.gguf*"), *tmp_path.glob("late*")]
