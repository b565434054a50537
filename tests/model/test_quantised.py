"""Checkpoints made by hand, element by element, in the formats of others, against the weights that they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from typer.testing import CliRunner

import outsize
import zoo
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader
from outsize.checkpoint.files.quantised import stored_as
from outsize.cli.app import app
from outsize.errors import CheckpointError, ModelError
from outsize.model.build import build_skeleton, load_hf_config
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from outsize.training.run import train
from support import make_model_dir, make_run

BLOCK, NESTED = 64, 4
LEVELS = torch.linspace(-1, 1, 16) ** 3
Packed = tuple[Tensor, dict[str, Tensor]]
"""The matrix that is stood for, in fp32, and the tensors that stand for it, by what follows the module's name."""


def bitsandbytes(shape: torch.Size, nested: bool = False) -> Packed:
    numel = shape.numel()
    codes = torch.randint(0, 16, (numel,), dtype=torch.uint8)
    blocks = -(-numel // BLOCK)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": "bfloat16",
        "shape": list(shape),
    }
    parts = {".weight.quant_map": LEVELS.clone()}
    if nested:
        bytes_, scales = torch.randint(0, 256, (blocks,), dtype=torch.uint8), torch.rand(-(-blocks // NESTED))
        levels = torch.linspace(-1, 1, 256)
        state |= {"nested_blocksize": NESTED, "nested_offset": 1.25, "nested_dtype": "float32"}
        parts |= {".weight.nested_absmax": scales, ".weight.nested_quant_map": levels}
        magnitudes = [levels[int(b)] * scales[i // NESTED] + torch.tensor(1.25) for i, b in enumerate(bytes_)]
        parts[".weight.absmax"] = bytes_
    else:
        parts[".weight.absmax"] = torch.rand(blocks)
        magnitudes = list(parts[".weight.absmax"])
    values = torch.stack([LEVELS[int(code)] * magnitudes[i // BLOCK] for i, code in enumerate(codes)])
    even = numel + numel % 2
    padded = torch.zeros(even, dtype=torch.uint8)
    padded[:numel] = codes
    parts[".weight"] = torch.tensor(
        [[int(padded[i]) * 16 + int(padded[i + 1])] for i in range(0, even, 2)], dtype=torch.uint8
    )
    text = json.dumps(state).encode()
    parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return values.view(shape), parts


def stored_as_bf16(shape: torch.Size) -> Packed:
    """As ``bnb_4bit_quant_storage="bfloat16"`` has it: the same bytes under another dtype."""
    values, parts = bitsandbytes(shape)
    return values, {**parts, ".weight": parts[".weight"].view(-1, 2).view(torch.bfloat16)}


def word(integers: list[int], bits: int = 4) -> int:
    value = sum(integer << bits * place for place, integer in enumerate(integers))
    return value - 2**32 if value >= 2**31 else value


def gptq(shape: torch.Size, in_order: bool = True, v2: bool = False, bits: int = 4) -> Packed:
    out, into, groups, n = *shape, 2, 32 // bits
    q, z = torch.randint(0, 2**bits, (into, out)), torch.randint(0, 2**bits, (groups, out))
    scales = torch.rand(groups, out).half()
    of = torch.arange(into) * groups // into
    if not in_order:
        of = of[torch.randperm(into)]
    matrix = torch.stack([(q[i] - z[of[i]]).float() * scales[of[i]].float() for i in range(into)])
    stored = z if v2 else (z - 1) % 2**bits
    qweight = [[word(q[i : i + n, j].tolist(), bits) for j in range(out)] for i in range(0, into, n)]
    qzeros = [[word(stored[g, j : j + n].tolist(), bits) for j in range(0, out, n)] for g in range(groups)]
    return matrix.T, {
        ".qweight": torch.tensor(qweight, dtype=torch.int32),
        ".qzeros": torch.tensor(qzeros, dtype=torch.int32),
        ".scales": scales,
        ".g_idx": of.int(),
    }


def awq(shape: torch.Size) -> Packed:
    out, into, groups = *shape, 2
    q, z = torch.randint(0, 16, (into, out)), torch.randint(0, 16, (groups, out))
    scales = torch.rand(groups, out).half()
    matrix = torch.stack(
        [(q[i] - z[i * groups // into]).float() * scales[i * groups // into].float() for i in range(into)]
    )

    def packed(rows: Tensor) -> Tensor:
        words = [
            [word([int(row[j + k]) for k in (0, 2, 4, 6, 1, 3, 5, 7)]) for j in range(0, out, 8)]
            for row in rows
        ]
        return torch.tensor(words, dtype=torch.int32)

    return matrix.T, {".qweight": packed(q), ".qzeros": packed(z), ".scales": scales}


FORMATS: dict[str, tuple[Callable[[torch.Size], Packed], dict[str, Any]]] = {
    "bitsandbytes": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes, nested": (
        lambda shape: bitsandbytes(shape, nested=True),
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
    ),
    "bitsandbytes, stored as bf16": (stored_as_bf16, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq, 8 bits": (lambda shape: gptq(shape, bits=8), {"quant_method": "gptq", "bits": 8}),
    "gptq, 2 bits": (lambda shape: gptq(shape, bits=2), {"quant_method": "gptq", "bits": 2}),
    "gptq, act order": (lambda shape: gptq(shape, in_order=False), {"quant_method": "gptq", "bits": 4}),
    "gptq_v2": (
        lambda shape: gptq(shape, v2=True),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
}


def make_quantised(directory: Path, name: str) -> Path:
    """A tiny Llama whose projections are quantised, and beside it (``-plain``) what it stands for, in fp32."""
    make, quantisation = FORMATS[name]
    plain = make_model_dir(directory.with_name(directory.name + "-plain"))
    make_model_dir(directory)
    tensors, values = load_file(directory / "model.safetensors"), load_file(plain / "model.safetensors")
    for key in [key for key in tensors if key.endswith("_proj.weight")]:
        matrix, parts = make(tensors.pop(key).shape)
        values[key] = matrix.contiguous()
        tensors |= {key.removesuffix(".weight") + end: part for end, part in parts.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return directory


@pytest.fixture(params=FORMATS)
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_quantised(tmp_path / "model", request.param)


def test_any_stretch_of_any_matrix_is_what_it_stands_for(quantised: Path):
    want = load_file(quantised.with_name("model-plain") / "model.safetensors")
    reader = CheckpointReader(quantised, build_skeleton(load_hf_config(quantised), frozen=True))
    assert not reader.unexpected
    for name, value in want.items():
        flat = value.reshape(-1)
        for start, stop in ((0, len(flat)), (0, 1), (7, len(flat) - 3), (len(flat) // 2 + 1, len(flat))):
            got = torch.empty(stop - start)
            reader.read(name, start, stop, got)
            assert torch.equal(got, flat[start:stop]), (name, start, stop)
        half = torch.empty(len(flat), dtype=torch.bfloat16)
        reader.read(name, 0, len(flat), half)
        assert torch.equal(half, flat.bfloat16())


def test_a_frozen_model_of_it_computes_what_the_decoded_one_does(quantised: Path):
    batch = zoo.batch("llama", num_sequences=2)
    plain = AutoModelForCausalLM.from_pretrained(quantised.with_name("model-plain")).eval()
    model = outsize.load(quantised, dtype="fp32", trainable=False, device="cpu", device_memory="1GiB")
    try:
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, plain(**batch).logits)
        assert not hasattr(model.config, "quantization_config")
    finally:
        outsize.unwrap(model)
    with pytest.raises(ModelError, match="cannot be trained"):
        outsize.load(quantised, dtype="fp32", device="cpu", device_memory="1GiB")


@pytest.mark.parametrize(("name", "codec"), [("bitsandbytes, nested", "nf4"), ("gptq, act order", "raw")])
def test_adapters_train_beside_it_as_beside_the_decoded_one(name: str, codec: str, tmp_path: Path):
    found = []
    for which in (make_quantised(tmp_path / "model", name), tmp_path / "model-plain"):
        run = make_run(
            tmp_path / which.name / "of",
            model={"path": str(which)},
            train={
                "method": "lora",
                "steps": 2,
                "loss": "model",
                "run_dir": str(tmp_path / f"{which.name}-run"),
            },
            lora={"r": 2, "target_modules": ["q_proj"], "base_codec": codec},
        )
        found.append(train(run).loss)
    assert found[0] == found[1]
    with pytest.raises(ModelError, match="--method lora"):
        prepare(RunSpec.of(make_run(tmp_path, train={"method": "full"}), tmp_path / "run"), lambda _: None)


@pytest.mark.parametrize(
    ("name", "missing"),
    [("bitsandbytes", ".weight.absmax"), ("gptq", ".scales"), ("awq", ".qzeros")],
)
def test_a_part_that_is_missing_is_named(name: str, missing: str, tmp_path: Path):
    path = make_quantised(tmp_path / "model", name)
    key = "model.layers.1.mlp.up_proj" + missing
    tensors = load_file(path / "model.safetensors")
    del tensors[key]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"{key} is missing"):
        CheckpointReader(path, build_skeleton(load_hf_config(path), frozen=True))


def test_scales_that_a_model_of_transformers_has_no_place_for_are_refused(tmp_path: Path):
    path = make_quantised(tmp_path / "model", "awq")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.act.scales"] = torch.ones(4)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="into an activation"):
        CheckpointReader(path, build_skeleton(load_hf_config(path), frozen=True))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path):
    for name, key in (("bitsandbytes", ".weight.absmax"), ("gptq", ".scales"), ("awq", ".qzeros")):
        path = make_quantised(tmp_path / name, name)
        tensors = load_file(path / "model.safetensors")
        whole = "model.layers.1.mlp.up_proj" + key
        tensors[whole] = tensors[whole][:1].clone()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match="do not"):
            CheckpointReader(path, build_skeleton(load_hf_config(path), frozen=True))


def _says(kind: str) -> dict[str, Any]:
    """What a config says that transformers reads as ``kind``."""
    method, _, bits = kind.partition("_") if kind.startswith("bitsandbytes") else (kind, "", "")
    return {"quant_method": method, "bits": 4, **({f"load_in_{bits}": True} if bits else {})}


@pytest.mark.parametrize("kind", AUTO_QUANTIZATION_CONFIG_MAPPING)
def test_what_a_config_says_of_weights_that_are_plain_is_refused_by_its_name(kind: str, tmp_path: Path):
    """For each kind that transformers knows: training, adapters and frozen; plan tells it."""
    path, says = make_model_dir(tmp_path / "model"), _says(kind)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": says}))
    name = str(says["quant_method"])
    for frozen in (False, True):
        with pytest.raises((ModelError, CheckpointError), match=name) as raised:
            CheckpointReader(path, build_skeleton(load_hf_config(path), frozen=frozen))
        assert "download" in str(raised.value) or "made from" in str(raised.value)
    assert name in str(stored_as(json.loads((path / "config.json").read_text())))


@pytest.mark.parametrize("kind", AUTO_QUANTIZATION_CONFIG_MAPPING)
def test_no_command_takes_plain_weights_for_what_their_config_says(kind: str, tmp_path: Path):
    path, says = make_model_dir(tmp_path / "model"), _says(kind)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": says}))
    name = str(says["quant_method"])
    run = tmp_path / "run"
    calls: dict[str, Callable[[], object]] = {
        "train": lambda: train(make_run(tmp_path, train={"run_dir": str(run)})),
        "adapters": lambda: train(make_run(tmp_path, train={"method": "lora", "run_dir": str(run)})),
        "load": lambda: outsize.load(path, dtype="fp32", trainable=False, device="cpu", device_memory="1GiB"),
        "train what is loaded": lambda: outsize.load(path, dtype="fp32", device="cpu", device_memory="1GiB"),
    }
    for call in calls.values():
        with pytest.raises((ModelError, CheckpointError), match=name):
            call()
    assert not list(run.glob("checkpoints/*"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a b"}\n')
    for command in (
        ["generate", str(path), "--prompt", "a"],
        ["score", str(path), "--data", str(texts), "--out", str(tmp_path / "scores.jsonl")],
    ):
        result = CliRunner().invoke(app, command)
        assert (result.exit_code != 0, name in result.output) == (True, True), (command, result.output)


def test_a_config_and_weights_of_different_formats_are_refused(quantised: Path):
    config = json.loads((quantised / "config.json").read_text())
    others = {
        "bitsandbytes": {"quant_method": "gptq"},
        "gptq": {"load_in_4bit": True},
        "awq": {"load_in_4bit": True},
    }
    other = others[config.pop("quantization_config")["quant_method"]]
    for says in ({}, {"quantization_config": other}):
        (quantised / "config.json").write_text(json.dumps({**config, **says}))
        with pytest.raises(CheckpointError, match="do not belong together"):
            CheckpointReader(quantised, build_skeleton(load_hf_config(quantised), frozen=True))


@pytest.mark.parametrize(
    ("says", "refused"),
    [
        (GPTQConfig(bits=4, format="gptq_v2"), None),
        (GPTQConfig(bits=4), None),
        (GPTQConfig(bits=4, format="marlin"), "gptq, 4 bits, marlin"),
        (AwqConfig(format="gemm"), None),
        (AwqConfig(format="gemv"), "awq, 4 bits, gemv"),
        (AwqConfig(backend="llm-awq"), "awq, 4 bits, llm-awq"),
    ],
    ids=str,
)
@pytest.mark.parametrize("legacy", [True, False])
def test_a_layout_counts_under_each_name_that_transformers_writes(
    says: GPTQConfig, refused: str | None, legacy: bool, tmp_path: Path
):
    method, layout = says.quant_method.value, str(getattr(says.format, "value", says.format))
    key = ("version" if method == "awq" else "checkpoint_format") if legacy else "format"
    settings = {"quant_method": method, "bits": 4, key: layout}
    config = zoo.make_config("llama")
    config.quantization_config = settings
    if refused is not None:
        with pytest.raises(ModelError, match=refused):
            build_skeleton(config, frozen=True)
        return
    name = "gptq_v2" if layout == "gptq_v2" else method
    path = make_quantised(tmp_path / "model", name)
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**stored, "quantization_config": settings}))
    want = load_file(path.with_name("model-plain") / "model.safetensors")
    reader = CheckpointReader(path, build_skeleton(load_hf_config(path), frozen=True))
    for key, value in want.items():
        got = torch.empty(value.numel())
        reader.read(key, 0, value.numel(), got)
        assert torch.equal(got, value.reshape(-1)), key
