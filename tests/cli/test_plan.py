import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cli.command_line import LLAMA, status_of
from doctor.records import cpu_machine
from hardware.fake_machine import measured
from outsize.cli import main
from outsize.config import load_config
from outsize.data.reading.record_lengths import count_data, length_for, sequences_for
from outsize.errors import DataError
from outsize.hardware.cards import parse_gpus

run = partial(status_of, "plan")


def answer(capsys, *arguments):
    assert run(*arguments, "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def test_the_tables_say_that_they_predict_and_from_what(model_dir, capsys):
    assert (
        run(model_dir, "--gpus", "4090", "--kernels", "fused", "--seq-len", 128, "--tokens", "1M", "--full")
        == 0
    )
    text = capsys.readouterr().out
    for words in (
        "A prediction from the figures below, not a measurement",
        "optimizer state",
        "1M tokens take",
        "what would help",
        "verdict: fits. What ends it is",
        "NVIDIA Ada white paper",
        "assumed: a backward takes two forwards",
    ):
        assert words in text


def test_what_matters_first_is_said_in_ten_lines(model_dir, capsys):
    assert run(model_dir, "--gpus", "4090", "--seq-len", 128, "--tokens", "1M") == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) <= 12
    text = " ".join(lines)
    for words in (
        "fits, its training state in host memory",
        "tokens/s (",
        "what ends a step is",
        "1M tokens take",
        "--full",
    ):
        assert words in text
    assert "to change first" in text or "nothing that is usually changed gains two percent" in text


def test_other_ways_to_train_are_set_beside_it(model_dir, tmp_path, capsys):
    arguments = (model_dir, "--gpus", "2x4090", "--seq-len", 128, "--no-advice", "--compare")
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    for words in ("outsize, predicted", "data parallel 2", "ZeRO-3 or FSDP", "tensor parallel 2", "managed"):
        assert words in text
    found = answer(capsys, *arguments)
    assert [way["name"] for way in found["other_ways"]][:2] == ["data parallel 2", "pipeline parallel 2"]
    assert any("tensor parallelism sums activations" in line for line in found["warnings"])
    fastest = max((way for way in found["other_ways"] if way["fits"]), key=lambda way: way["tokens_per_s"])
    better = fastest["name"] if fastest["tokens_per_s"] >= 1.05 * found["tokens_per_s"] else "outsize"
    assert found["choice"].startswith(f"so: {better}, since ")
    assert found["choice"] in " ".join(text.split())
    found = answer(capsys, *arguments, "--nodes", 2, "--net", "25Gb")
    assert [way["name"] for way in found["other_ways"]][:3] == [
        f"{way} parallel 4" for way in ("data", "pipeline", "tensor")
    ]
    each = tmp_path / "each.json"
    each.write_text(parse_gpus("2x4090").of_each_gpu().to_json())
    alone = answer(capsys, model_dir, "--machine", each, *arguments[3:], "--nodes", 4, "--net", "12.5Gb")
    assert found["nodes"] == alone["nodes"] == 4
    assert found["tokens_per_s"] == alone["tokens_per_s"]


def test_json_has_it_all(model_dir, capsys):
    found = answer(
        capsys,
        *(model_dir / "config.json", "--gpus", "2x4090", "--seq-len", 128, "--tokens", "1M"),
        *("--what-if", "vram=+8GB", "--what-if", "gpus=+1", "--no-advice"),
    )
    assert found["kind"] == "prediction"
    assert found["verdict"] == "fits"
    assert found["tokens_per_step"] == 64 * 128
    assert found["steps"] == 123
    assert found["eta_s"] == pytest.approx(123 * found["step_s"])
    assert set(found["memory_bytes"]) == {"device", "host", "disk"}
    assert [entry["change"] for entry in found["what_if"]] == ["vram=+8GB", "gpus=+1"]
    assert found["what_would_help"] == []
    assert all(figure["source"] and not figure["measured"] for figure in found["figures"])
    assert any("lie on every GPU" in line for line in found["assumptions"])


def test_a_machine_of_one_s_own(model_dir, tmp_path, capsys):
    machine = tmp_path / "machine.json"
    machine.write_text(parse_gpus("h100").to_json())
    options = (model_dir, "--seq-len", 128, "--no-advice")
    described = answer(capsys, *options, "--machine", machine)
    named = answer(capsys, *options, "--gpus", "h100")
    assert described == named
    machine.write_text("{}")
    assert run(*options, "--machine", machine) == 2
    assert "not the description of a machine" in capsys.readouterr().err
    assert run(*options, "--machine", tmp_path / "none.json") == 2
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(("bf16", "is_told"), [(0.5, True), (1.0, False), (2.0, False)])
def test_a_processor_that_multiplies_faster_in_fp32_is_told(model_dir, tmp_path, capsys, bf16, is_told):
    found = cpu_machine(tmp_path / "root")
    rates = {"fp32": measured(1e11), "bf16": measured(bf16 * 1e11)}
    device = found.devices[0].model_copy(update={"matmul_flops_per_s": rates})
    (tmp_path / "machine.json").write_text(found.model_copy(update={"devices": (device,)}).to_json())
    options = (model_dir, "--seq-len", 128, "--no-advice", "--machine", tmp_path / "machine.json")
    text = "products in bf16 take 2.0 times as long as in fp32"
    assert run(*options, "--dtype", "bf16") == 0
    assert (text in " ".join(capsys.readouterr().out.split())) == is_told
    told = answer(capsys, *options, "--dtype", "bf16")["assumptions"]
    assert any(line.startswith(text) and "--dtype fp32" in line for line in told) == is_told
    assert not any(
        "as long as in fp32" in line for line in answer(capsys, *options, "--dtype", "fp32")["assumptions"]
    )


def test_changes_are_asked_about_beside_the_codec_that_was_found(model_dir, tmp_path, capsys):
    """Of frozen weights on a slow link, where another rate of compute changes nothing."""
    machine = parse_gpus("4090")
    link = machine.links[0]
    slow = replace(link, up_bytes_per_s=replace(link.up_bytes_per_s, value=1e6))
    file = tmp_path / "machine.json"
    file.write_text(replace(machine, links=(slow,)).to_json())
    options = (model_dir, "--machine", file, "--seq-len", 8, "--tokens-per-step", 8, "--method", "lora")
    options = (*options, "--resident", "none", "--transport-weights", "auto")
    found = answer(capsys, *options, "--what-if", "compute=x2", "--no-advice")
    assert any("weights go over links as lossless" in line for line in found["assumptions"])
    assert 0 <= found["what_if"][0]["gain"] < 0.01


def test_a_change_that_is_none_of_this_machine_is_answered_so_beside_the_plan(model_dir, capsys):
    changes = ("--what-if", "state=int8", "--what-if", "compute=x2")
    options = ("--gpus", "2x4090", "--seq-len", 128, "--optimizer", "Adafactor", "--no-advice")
    found = answer(capsys, model_dir, *options, *changes)
    state, compute = found["what_if"]
    assert "keeps no moments that could be rounded" in state["error"]
    assert not state["fits"]
    assert compute["fits"]


def test_what_is_no_change_is_said_before_anything_is_searched(model_dir, capsys, monkeypatch):
    monkeypatch.setattr(
        "outsize.planner.predict.decision_search.decide", lambda question: pytest.fail("searched")
    )
    assert run(model_dir, "--gpus", "2x4090", "--seq-len", 128, "--what-if", "state=int9") == 2
    assert "what moments are kept in" in capsys.readouterr().err


def test_files_of_tokens_are_counted_or_refused_by_name(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    for name in ("a", "b"):
        np.save(tokens / f"{name}.npy", np.arange(500, dtype=np.uint16))
    assert count_data(tokens, tmp_path).tokens == 1000
    np.save(tmp_path / "float.npy", np.zeros(3))
    (tmp_path / "broken.npy").write_bytes(b"no header")
    (tmp_path / "raw.bin").write_bytes(bytes(64))
    for name, words in {
        "float": "whole numbers",
        "broken": "not a .npy file",
        "raw": "write --tokens",
    }.items():
        path = next(tmp_path.glob(f"{name}.*"))
        with pytest.raises(DataError, match=words):
            count_data(path, tmp_path)


def test_chats_are_planned_as_they_are_trained(model_dir, tmp_path, capsys):
    """In the sequences and steps that a run chooses for them, by the same rules."""
    chats, planned = tmp_path / "chats.jsonl", tmp_path / "run.yaml"
    turns = [{"role": "user", "content": "word " * 4}, {"role": "assistant", "content": "word " * 12}]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 5000)
    of = (model_dir / "config.json", "--gpus", "4090", "--no-advice", "--data", chats)
    found = answer(capsys, *of, "--output", planned)
    length = math.ceil((len("word " * 16) + 1) / 4 + 10)
    assert found["seq_len"] == length_for([length], 2**62) == 64
    assert found["tokens_per_step"] == 64 * sequences_for(5000, length / 64)
    assert found["tokens"] == pytest.approx(5000 * length, rel=0.05)
    config = load_config(planned, environ={})
    assert config.data.pack == "documents"
    assert config.train.epochs == 1
    named = answer(capsys, *of, "--tokens-per-step", 1024)
    assert (named["seq_len"], named["tokens_per_step"]) == (64, 1024)
    ids = tmp_path / "ids.bin"
    ids.write_bytes(bytes(64))
    assert answer(capsys, *of[:-1], ids, "--tokens", "1M")["tokens"] == 1e6
    lines = tmp_path / "lines.txt"
    lines.write_text("word " * 100)
    assert answer(capsys, *of[:-1], lines)["tokens_per_step"] > 1024


def test_data_are_counted_for_their_epochs(model_dir, tmp_path, capsys):
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "word " * 200}, {"role": "assistant", "content": "word " * 600}]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 5000)  # more than what is read of it
    of = (model_dir / "config.json", "--gpus", "4090", "--seq-len", 128, "--no-advice", "--data", chats)
    found = answer(capsys, *of, "--epochs", 3, "--home", "disk")
    assert found["tokens"] == pytest.approx(3 * 5000 * (4001 / 4 + 10), rel=0.06)
    assert found["steps"] == -(-found["tokens"] // found["tokens_per_step"])
    assert found["disk_written_bytes"] > 0 == found["disk_written_bytes"] % found["steps"]
    assert run(*of, "--home", "disk") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "steps (chats.jsonl: 4 bytes are taken for a token" in text
    assert "of what an SSD of its size is usually warranted for" in text
    assert answer(capsys, *of[:-2])["tokens"] is None


def test_tokens_are_as_many_where_encoded_weights_fit(tmp_path, capsys):
    """On a machine without a disk, whose memory lacks 8 MiB of 50."""
    config, machine = tmp_path / "config.json", tmp_path / "machine.json"
    config.write_text(json.dumps(LLAMA | {"hidden_size": 1024, "intermediate_size": 2048}))
    machine.write_text(replace(parse_gpus("4090"), disk=None).to_json())
    options = (config, "--machine", machine, "--seq-len", 8, "--method", "lora", "--no-advice")
    roomy = answer(capsys, *options)
    tight = ("--host-memory", sum(roomy["memory_bytes"]["host"].values()) - 2**23)
    assert run(*options, *tight) != 0
    capsys.readouterr()
    found = answer(capsys, *options, *tight, "--transport-weights", "auto")
    assert found["tokens_per_step"] == roomy["tokens_per_step"]


def test_the_timeline_opens_in_perfetto(model_dir, tmp_path):
    file = tmp_path / "timeline.json"
    assert run(model_dir, "--gpus", "2x4090", "--seq-len", 128, "--no-advice", "--timeline", file) == 0
    trace = json.loads(file.read_text())["traceEvents"]
    rows = {event["args"]["name"] for event in trace if event["ph"] == "M" and "name" in event["args"]}
    assert {"compute:w0", "compute:w1", "host"} <= rows


def test_a_dry_run_of_the_config_plans_what_was_predicted(tmp_path, capsys):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {key: value for key, value in LLAMA.items() if key not in ("model_type", "architectures")}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    file = tmp_path / "train.yaml"
    sizes = ("--seq-len", 128, "--tokens-per-step", 1024, "--ram", "4GB")
    options = ("--gpus", "4090", *sizes, "--home", "host", "--no-advice")
    predicted = answer(capsys, tmp_path / "model", *options, "--output", file)
    with pytest.raises(SystemExit) as done:
        main(["train", str(file), "--dry-run", "--json"])
    assert not done.value.code
    dry = json.loads(capsys.readouterr().out.splitlines()[-1])
    planned = dry["plan"]["memory_bytes"]
    assert sum(planned["device"].values()) == pytest.approx(
        sum(predicted["memory_bytes"]["device"].values()), rel=0.05
    )
    assert sum(planned["host"].values()) == pytest.approx(
        sum(predicted["memory_bytes"]["host"].values()), rel=0.05
    )
    assert dry["plan"]["microbatches"] == predicted["microbatches"]


def test_a_plan_of_several_gpus_is_written_for_all_of_them(model_dir, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    answer(capsys, model_dir, "--gpus", "2x4090", "--seq-len", 128, "--no-advice", "--output", file)
    assert "device: cuda:0,1" in file.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "8x4900"], "unknown GPU '4900'; did you mean 4090"),
        (["--gpus", "0x4090"], "not a number of GPUs"),
        ([], "say which machine, once"),
        (["--gpus", "4090", "--machine", "m.json"], "say which machine, once"),
        (["--gpus", "16x4090"], "at most 11 stages; use at most 11 devices"),
        (["--gpus", "4090", "--tokens", "0"], "zero tokens take no time"),
        (["--gpus", "4090", "--tokens", "many"], "not a count"),
        (
            ["--gpus", "4090", "--epochs", "2", "--data", "nowhere.jsonl"],
            "--epochs: no data at nowhere.jsonl",
        ),
        (["--gpus", "4090", "--epochs", "2", "--tokens", "1M"], "leave one out"),
        (["--gpus", "4090", "--tokens-per-step", "0"], "train.tokens_per_step: must be at least 2"),
        (["--gpus", "4090", "--tokens-per-step", "100"], "not a multiple of data.seq_len (128)"),
        (["--gpus", "4090", "--microbatches", "65"], "lower train.microbatches"),
        (["--gpus", "4090", "--device-memory", "2MiB"], "short: device by"),
        (["--gpus", "4090", "--device-memory", "much"], "not a size"),
        (["--gpus", "4090", "--device-memory", "48GB"], "more than the 24.00 GiB of this machine"),
        (["--gpus", "4090", "--ram", "64GB", "--host-memory", "4TB"], "with --ram"),
        (["--gpus", "4090", "--what-if", "ram=+64"], "how much more, for example +8GB"),
        (["--gpu-spec", "memory=24GB,tflops=inf,gbps=1008"], "describes no GPU"),
        (["--gpus", "4090", "--home", "host", "--host-memory", "1MiB"], "short: host by"),
        (["--gpus", "4090", "--what-if", "vrm=+8GB"], "did you mean vram"),
        (["--gpus", "2x4090", "--home", "disk", "--host-memory", "1MiB"], "short: host by"),
        (["--gpus", "4090", "--timeline", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
    ],
)
def test_mistakes_are_named(model_dir, capsys, options, words):
    assert run(model_dir, "--seq-len", 128, *options) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_if_answers_where_the_base_does_not_fit(model_dir, capsys):
    options = ("--seq-len", 128, "--gpus", "4090", "--device-memory", "2MiB", "--what-if", "vram=+1GB")
    assert run(model_dir, *options) == 2
    error = capsys.readouterr().err
    assert "what if vram=+1GB: fits" in error
    assert "InfeasiblePlanError" in error


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_type": "mamba3"}', "transformers does not know it"),
        ('{"model_type": "llama"}', "lacks a size"),
        ("[1]", "it holds no object"),
        ("{", "cannot be read"),
    ],
)
def test_configs_that_tell_no_sizes(tmp_path, capsys, text, words):
    (tmp_path / "config.json").write_text(text)
    assert run(tmp_path, "--gpus", "4090") == 2
    assert words in capsys.readouterr().err


def test_places_without_a_model(tmp_path, capsys):
    assert run(tmp_path, "--gpus", "4090") == 2
    assert "has no config.json" in capsys.readouterr().err
    assert run(tmp_path / "none", "--gpus", "4090") == 2
    assert "no such file or directory" in capsys.readouterr().err


def test_sequences_longer_than_the_model(model_dir, capsys):
    assert run(model_dir, "--gpus", "4090", "--seq-len", 8192) == 2
    assert "longer than the 4096 positions" in capsys.readouterr().err


def test_sequences_are_as_long_as_the_model_takes_where_none_are_named(model_dir, capsys):
    for positions, tokens in ((4096, 64 * 2048), (512, 64 * 512)):
        (model_dir / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": positions}))
        assert answer(capsys, model_dir, "--gpus", "4090", "--no-advice")["tokens_per_step"] == tokens


def test_the_machine_is_looked_at_first(model_dir, capsys):
    assert run(model_dir, "--gpus", "4091", "--seq-len", 8192) == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_plan_is_made_without_torch(model_dir):
    """A machine without it, or without the seconds that importing it takes, plans as well."""
    script = (
        "import sys\nfrom outsize.cli import main\n"
        f"try:\n    main(['plan', {str(model_dir)!r}, '--gpus', '2x4090', '--seq-len', '128'])\n"
        "except SystemExit as done:\n    assert not done.code\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
