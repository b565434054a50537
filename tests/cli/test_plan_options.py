"""LoRA, nodes, hub ids and the largest model: what `outsize plan` takes, and what it says of mistakes."""

import json

import pytest

from cli.command_line import LLAMA
from cli.test_plan import answer, run
from outsize.cli.plan import plan_model
from outsize.cli.plan.plan_compare import last_that_fits
from outsize.cli.plan.plan_model import read_config
from outsize.cli.plan.plan_question import in_options
from outsize.config import load_config
from outsize.errors import ModelError


@pytest.mark.parametrize("gpus", ["4090", "2x4090"])
def test_lora_trains_little_and_says_so(model_dir, capsys, gpus, tmp_path):
    options = (model_dir, "--gpus", gpus, "--seq-len", 128, "--no-advice")
    full = answer(capsys, *options)
    written = tmp_path / "train.yaml"
    lora = answer(
        capsys, *options, "--method", "lora", "--lora-modules", "q_proj,o_proj", "--output", written
    )
    assert lora["num_trainable"] == 4 * 2 * 8 * (64 + 64)
    assert lora["num_parameters"] == full["num_parameters"] + lora["num_trainable"]
    assert (
        lora["memory_bytes"]["host"]["optimizer state"]
        < 0.2 * full["memory_bytes"]["host"]["optimizer state"]
    )
    assert lora["memory_bytes"]["host"]["frozen weights"] > 0
    assert (lora["dtype"], lora["method"]) == ("bf16", "lora")
    config = load_config(written, [])
    assert (config.train.method, config.lora.r, config.lora.target_modules) == (
        "lora",
        8,
        ("q_proj", "o_proj"),
    )
    assert run(*options, "--method", "lora") == 0
    assert "LoRA of rank 8 on q_proj, v_proj on" in " ".join(capsys.readouterr().out.split())


def test_what_an_error_advises_is_an_option_here(model_dir, capsys):
    advised = in_options("first try train.mlp_parts=4, or a smaller train.head_chunk_tokens; lora.alpha=3")
    assert advised == "first try --mlp-parts 4, or a smaller --head-chunk-tokens; lora.alpha=3"
    assert in_options("name lora.target_modules") == "name --lora-modules"
    options = (model_dir, "--gpus", "4090", "--seq-len", 128, "--no-advice", "--microbatches", 64)
    large, small = (
        answer(capsys, *options, "--head-chunk-tokens", tokens)["memory_bytes"]["device"]["workspace"]
        for tokens in (128, 8)
    )
    assert small < large


def test_products_in_fp8_are_faster_and_less_certain(model_dir, capsys, tmp_path):
    options = (model_dir, "--gpus", "4090", "--kernels", "fused", "--seq-len", 128, "--no-advice")
    written = tmp_path / "train.yaml"
    plain = answer(capsys, *options)
    fast = answer(capsys, *options, "--products", "fp8", "--output", written)
    assert fast["step_s"] < plain["step_s"]
    low, high = (each["interval"] for each in (plain, fast))
    assert high[1] / high[0] > low[1] / low[0]
    assert any(figure["name"] == "linear layers of blocks in fp8" for figure in fast["figures"])
    assert load_config(written, []).model.products == "fp8"


def test_nodes_share_the_step(model_dir, capsys):
    options = (model_dir, "--gpus", "4090", "--seq-len", 128, "--no-advice", "--kernels", "fused")
    one = answer(capsys, *options, "--tokens-per-step", 1024 * 128)
    four = answer(capsys, *options, "--tokens-per-step", 4096 * 128, "--nodes", 4, "--net", "100Gb")
    assert (four["nodes"], four["tokens_per_step"]) == (4, 4096 * 128)
    assert four["tokens_per_s"] > 2 * one["tokens_per_s"]
    assert "network" in four["usage"]
    coded = (
        *options,
        "--tokens-per-step",
        4096 * 128,
        "--nodes",
        4,
        "--net",
        "1Gb",
    )
    slow, less = answer(capsys, *coded), answer(capsys, *coded, "--net-gradients", "int4-stochastic")
    assert less["tokens_per_s"] > 1.2 * slow["tokens_per_s"]
    assert run(*options, "--net-gradients", "bf16") == 2
    assert "no effect with one node" in capsys.readouterr().err
    assert run(*options, "--nodes", 2, "--net", "3GB") == 0
    assert "on 2 nodes of 1x4090" in " ".join(capsys.readouterr().out.split())


def test_the_largest_models_that_fit_are_larger_and_no_larger(model_dir, capsys):
    options = (model_dir, "--gpus", "4090", "--seq-len", 128, "--tokens-per-step", 512, "--no-advice")
    found = answer(capsys, *options, "--largest", "--host-memory", "64MiB", "--home", "host")
    base = found["num_parameters"]
    assert {model["what"] for model in found["largest"]} == {"more layers"}
    assert all(model["num_parameters"] > base for model in found["largest"])
    assert run(*options, "--largest", "--host-memory", "64MiB", "--home", "host") == 0
    assert "the largest of this family that fits" in capsys.readouterr().out


def test_the_largest_models_do_not_depend_on_tokens_per_step(model_dir, capsys):
    options = (model_dir, "--gpus", "4090", "--seq-len", 128, "--host-memory", "64MiB", "--home", "host")
    found = [
        answer(capsys, *options, "--largest", "--tokens-per-step", 128 * count)["largest"]
        for count in (32, 1024)
    ]
    assert found[0] == found[1]


def test_the_search_for_the_largest_ends_at_the_limit():
    size, parameters = last_that_fits(1000, lambda layers: 7 * layers if layers <= 100 else None)
    assert 97 <= size <= 100
    assert parameters == 7 * size
    assert last_that_fits(1000, lambda layers: None) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--method", "lora", "--lora-modules", "q_porj"), "k_proj, lm_head, o_proj, q_proj"),
        (("--method", "lora", "--lora-r", 0), "at least 1"),
        (("--method", "prefix"), "lora"),
        (("--nodes", 2), "--net 25Gb"),
        (("--nodes", 0, "--net", "1Gb"), "train nothing"),
        (("--nodes", 3, "--net", "1Gb"), "not shared evenly"),
        (("--nodes", 2, "--net", "fast"), "gigabits"),
        (("--nodes", 2, "--net", "0Gb"), "gigabits"),
        (("--nodes", 2, "--net", "1.2.5Gb"), "gigabits"),
        (("--net", "25Gb"), "no effect"),
        (("--tokens-per-step", 0), "tokens_per_step"),
        (("--tokens", "0"), "zero tokens"),
        (("--gpus", "4091"), "did you mean"),
        (("--gpus", "3090", "--products", "fp8", "--kernels", "fused"), "3090 has none by its data sheet"),
        (("--products", "fp8"), "add --kernels fused"),
        (("--gpus", "16x4090"), "at most 11 devices"),
        (("--device-memory", "1MiB"), "first try"),
        (("--host-memory", "1MiB", "--home", "host"), "first try"),
    ],
)
def test_bad_input_is_named_with_what_to_try(model_dir, capsys, options, words):
    given = (model_dir, *(() if "--gpus" in options else ("--gpus", "4090")), "--seq-len", 128, "--no-advice")
    assert run(*given, *options) != 0
    assert words in capsys.readouterr().err


def test_what_is_short_is_said_in_bytes_by_tier(model_dir, capsys):
    assert (
        run(
            model_dir, "--gpus", "4090", "--seq-len", 128, "--host-memory", "1MiB", "--home", "host", "--json"
        )
        != 0
    )
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["short_by"]["host"] > 0


def test_a_plan_for_another_model_s_config_is_refused(tmp_path, capsys):
    """Not a causal decoder, and a config that lacks a size."""
    for config, words in (
        ({"model_type": "t5"}, "is an encoder-decoder"),
        ({"model_type": "llama"}, "lacks a size"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert run(tmp_path, "--gpus", "4090") != 0
        assert words in capsys.readouterr().err


def test_of_a_hub_id_the_config_is_fetched_and_nothing_else(monkeypatch, tmp_path, capsys):
    asked = []

    def download(repo, file, *, local_files_only):
        asked.append((repo, file, local_files_only))
        path = tmp_path / "cached.json"
        path.write_text(json.dumps(LLAMA))
        return str(path)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(plan_model, "_is_there", lambda endpoint: True)
    written = tmp_path / "train.yaml"
    assert run("owner/tiny", "--gpus", "4090", "--seq-len", 128, "--no-advice", "--output", written) == 0
    assert asked == [("owner/tiny", "config.json", False)]
    assert load_config(written, []).model.path == "owner/tiny"
    monkeypatch.setattr(plan_model, "_is_there", lambda endpoint: False)
    assert read_config("tiny")[1] == LLAMA
    assert asked[-1] == ("tiny", "config.json", True)  # without a network, what lies in the cache


def test_a_hub_that_cannot_be_asked_is_a_clear_error(monkeypatch):
    from huggingface_hub.errors import LocalEntryNotFoundError

    def nothing(*_, **__):
        raise LocalEntryNotFoundError("not cached")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", nothing)
    monkeypatch.setattr(plan_model, "_is_there", lambda endpoint: False)
    with pytest.raises(
        ModelError, match="owner/tiny: no such file or directory, and the hub cannot be asked"
    ):
        read_config("owner/tiny")
    with pytest.raises(ModelError, match="give a model directory"):
        read_config("no/such/place")


def test_any_gpu_is_described_in_figures(model_dir, capsys):
    options = (model_dir, "--seq-len", 128, "--no-advice")
    named = answer(capsys, *options, "--gpus", "4090")
    spec = "memory=24GiB,tflops=165.2,gbps=1008"
    described = answer(capsys, *options, "--gpu-spec", f"{spec},share=0.7", "--ram", "128GiB")
    assert described["machine"] == "1xdescribed"
    assert described["budget_bytes"]["device"] == named["budget_bytes"]["device"]
    two = answer(capsys, *options, "--gpu-spec", f"{spec},count=2,name=mine,pcie=5x8")
    assert two["machine"] == "2xmine"


def test_the_host_is_said_by_options(model_dir, capsys):
    options = (model_dir, "--seq-len", 128, "--no-advice", "--gpus", "4090", "--home", "disk")
    found = answer(
        capsys, *options, "--disk", "1GB", "--disk-read", "2GB", "--disk-write", "1GB", "--cpu-cores", 2
    )
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert (figures["disk reads"], figures["disk writes"]) == (2e9, 1e9)
    assert figures["AdamW on the host"] == 1.8e9
    assert found["budget_bytes"]["disk"] == pytest.approx(0.9e9, rel=0.01)
    less = answer(capsys, *options, "--commits", "none")
    assert sum(less["memory_bytes"]["disk"].values()) < 0.6 * sum(found["memory_bytes"]["disk"].values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpus", "4090", "--ram", "64"), "64 without a unit is 64 bytes; write 64GB"),
        (("--gpus", "4090", "--device-memory", "20"), "write 20GB"),
        (("--gpus", "4090", "--lora-r", "32"), "--lora-r: full training has no adapters; add --method lora"),
        (("--gpus", "4090", "--ram", "much"), "not a size"),
        (("--gpu-spec", "memory=24GB"), "lacks tflops and gbps"),
        (("--gpu-spec", "memory=24GB,tflop=1"), "did you mean tflops"),
        (("--gpu-spec", "memory=24GB,tflops=fast,gbps=1"), "not a number"),
        (("--gpu-spec", "memory=24GB,tflops=1,gbps=1,pcie=9"), "not a slot"),
        (("--gpu-spec", "memory=24GB,tflops=1,gbps=1,count=1.5"), "describes no GPU"),
        (("--gpu-spec", "memory=24GB,tflops=1,gbps=1,share=2"), "at most all of the peak"),
        (("--gpus", "4090", "--gpu-spec", "memory=24GB,tflops=1,gbps=1"), "say which machine, once"),
        (("--gpus", "4090", "--disk", "none", "--disk-read", "1GB"), "without a disk"),
        (("--gpus", "4090", "--disk-read", "1Gb"), "not a rate"),
        (("--gpus", "4090", "--cpu-cores", "0"), "at least one"),
        (("--gpus", "t4"), "no rate for bf16 on t4"),
    ],
)
def test_a_machine_that_is_none_is_named_with_what_to_write(model_dir, capsys, options, words):
    assert run(model_dir, "--seq-len", 128, "--no-advice", *options) != 0
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("sequences", "said"), [(2, True), (8, False)])
def test_a_round_of_fewer_microbatches_than_gpus_is_said(model_dir, capsys, sequences, said):
    options = ("--gpus", "4x4090", "--seq-len", 128, "--tokens-per-step", 128 * sequences)
    assert run(model_dir, *options) == 0
    note = f"a round has {sequences} microbatches for 4 GPUs, which wait for each other: more tokens per step may help"
    assert (note in " ".join(capsys.readouterr().out.split())) == said


def test_the_file_of_a_run_is_asked_about_as_the_options_that_say_the_same(model_dir, capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{path: {model_dir}, dtype: fp32}}\n"
        "data: {path: corpus, seq_len: 128}\n"
        "train: {method: lora, tokens_per_step: 512}\n"
        "lora: {r: 4, target_modules: [q_proj, o_proj], base_codec: int8}\n"
    )
    machine = ("--gpus", "4090", "--no-advice")
    said = ("--dtype", "fp32", "--seq-len", 128, "--method", "lora", "--tokens-per-step", 512)
    adapters = ("--lora-r", 4, "--lora-modules", "q_proj,o_proj", "--base-codec", "int8")
    assert (
        answer(capsys, path, *machine)["plan_id"]
        == answer(capsys, model_dir, *machine, *said, *adapters)["plan_id"]
    )
    other = answer(capsys, path, *machine, "--dtype", "bf16", "--method", "full")  # what is default, too
    assert (other["dtype"], other["method"], other["seq_len"]) == ("bf16", "full", 128)
    path.write_text(path.read_text().replace("path: corpus, ", ""))  # no data are needed to plan
    assert answer(capsys, path, *machine)["method"] == "lora"


def test_a_frozen_model_in_four_bits_takes_less_and_full_training_freezes_none(model_dir, capsys):
    options = (model_dir, "--gpus", "4090", "--seq-len", 128, "--no-advice", "--base-codec", "nf4")
    four = answer(capsys, *options, "--method", "lora")["memory_bytes"]["host"]["frozen weights"]
    plain = answer(capsys, *options[:-2], "--method", "lora")["memory_bytes"]["host"]["frozen weights"]
    assert four < 0.8 * plain  # embedding and head stay as they are
    assert run(*options) == 2
    assert "add --method lora" in capsys.readouterr().err


def test_the_plan_of_a_run_reads_its_data_as_the_run_does_and_says_what_that_chooses(
    model_dir, tmp_path, capsys
):
    (data := tmp_path / "chats.jsonl").write_text('{"text": "a word"}\n{"text": 3}\n' * 20)
    text = (
        f"model: {{path: {model_dir}}}\ndata: {{path: {data}, max_bad_records: 20}}\ntrain: {{epochs: 1}}\n"
    )
    (file := tmp_path / "run.yaml").write_text(text)
    options = (file, "--gpus", "4090", "--no-advice")
    found = answer(capsys, *options, "--data", data)
    assert found["tokens"] > 0
    assert any("sequences of 512 tokens, for" in note for note in found["assumptions"])
    named = answer(capsys, *options, "--seq-len", 128)["assumptions"]
    assert not any("has no data.seq_len" in note for note in named)
    file.write_text(text.replace("max_bad_records: 20", "max_bad_records: 1"))
    assert run(*options, "--data", data) == 2
    assert "data.max_bad_records" in capsys.readouterr().err
