"""What `outsize plan` says of a model of 8 billion parameters on one GPU of 24 GB, by host memory."""

import json
from dataclasses import replace

import pytest

from cli.test_plan import answer, run
from outsize.config import load_config
from outsize.hardware.cards import parse_gpus

GB = 10**9
# Llama-3.1-8B.
SHAPE = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
SIX_BYTES = ("--optimizer-state", "int8", "--clip", "unit")
FIVE_BYTES = (*SIX_BYTES, "--masters", "split24")


@pytest.fixture
def asked(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return (tmp_path, "--gpus", "4090", "--no-advice", "--microbatches", 8)


def test_64_gb_hold_it_in_six_bytes_per_parameter(asked, capsys):
    found = answer(capsys, *asked, "--host-memory", "64GB", "--home", "host", *SIX_BYTES)
    host, count = found["memory_bytes"]["host"], found["num_parameters"]
    assert found["verdict"] == "fits"
    assert host["weights"] + host["master weights"] == pytest.approx(4 * count, rel=1e-3)
    assert host["optimizer state"] == pytest.approx(2.03125 * count, rel=1e-3)
    assert "gradients" not in host
    assert host["gradient ring"] < 0.2 * count
    assert sum(host.values()) < 64 * GB


def test_64_gb_are_told_what_to_try_and_that_disk_does_it_exactly(asked, capsys):
    assert run(*asked, "--host-memory", "64GB", "--home", "host") != 0
    said = capsys.readouterr().err
    assert "first try --optimizer-state int8 and --clip unit, with which it fits (short: host by" in said
    found = answer(capsys, *asked, "--host-memory", "64GB")
    assert (found["verdict"], found["home"]) == ("fits", "disk")


def test_48_gb_are_told_how_much_is_short_and_that_masters_of_24_bits_fit(asked, capsys):
    assert run(*asked, "--host-memory", "48GB", "--home", "host", *SIX_BYTES, "--json") != 0
    error = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < error["short_by"]["host"] < 6 * GB
    assert "first try --masters split24, with which it fits" in error["message"]


def test_48_gb_hold_it_in_five_bytes_per_parameter(asked, capsys):
    """With 6 GB for everything else."""
    found = answer(capsys, *asked, "--ram", "48GB", "--host-memory", "42GB", "--home", "host", *FIVE_BYTES)
    host, count = found["memory_bytes"]["host"], found["num_parameters"]
    assert host["weights"] + host["master weights"] == pytest.approx(3 * count, rel=1e-3)
    assert sum(host.values()) < 42 * GB
    assert run(*asked, "--host-memory", "40GB", "--home", "host", *FIVE_BYTES, "--json") != 0
    assert "first try the home on disk" in json.loads(capsys.readouterr().out.splitlines()[-1])["message"]


def test_a_machine_of_64_gb_says_yes_and_what_brings_the_state_into_its_memory(asked, capsys):
    """A run takes 80 % of it: 51.2 GB. Nothing that rounds is chosen unasked."""
    found = answer(capsys, *asked, "--ram", "64GB")
    assert (found["verdict"], found["home"]) == ("fits", "disk")
    assert "--optimizer-state int8 and --clip unit with fewer tokens per step" in found["why_on_disk"]
    assert run(*asked, "--ram", "64GB") == 0
    assert "home on disk, for want of host memory: there the smallest plan needs" in capsys.readouterr().out
    found = answer(capsys, *asked, "--ram", "64GB", *SIX_BYTES)  # as documented
    assert (found["verdict"], found["home"], found["why_on_disk"]) == ("fits", "host", None)
    assert found["tokens_per_step"] >= 16 * 2048  # as many as fit, where none are named
    assert sum(found["memory_bytes"]["host"].values()) < 0.8 * 64 * GB
    found = answer(capsys, *asked, "--ram", "64GB", "--tokens-per-step", 64 * 2048, *SIX_BYTES)
    assert found["home"] == "disk"
    assert "first try fewer tokens per step (short" in found["why_on_disk"]
    found = answer(capsys, *asked, "--host-memory", "50GB", *SIX_BYTES)
    assert (found["home"], found["tokens_per_step"]) == ("host", 32 * 2048)  # halved once


def test_a_machine_of_48_gb_says_what_is_short(asked, capsys):
    found = answer(capsys, *asked, "--ram", "48GB")
    assert found["home"] == "disk"
    assert "are lacking still" in found["why_on_disk"]
    assert run(*asked, "--ram", "48GB", "--home", "host", *SIX_BYTES, "--json") != 0
    error = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 8 * GB < error["short_by"]["host"] < 14 * GB


def test_moments_of_8_bits_are_advised_where_they_alone_fit(tmp_path, capsys):
    """Several GPUs sum gradients at home, so that clipping by unit is no way out; and neither is it nearer on one."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    options = ("--ram", "128GB", "--home", "host", "--no-advice", "--microbatches", 8)
    assert run(tmp_path, "--gpus", "2x3090", *options) != 0
    said = capsys.readouterr().err
    assert "first try --optimizer-state int8, with which it fits" in said
    assert "--clip unit" not in said
    found = answer(capsys, tmp_path, "--gpus", "2x3090", *options, "--optimizer-state", "int8")
    assert (found["verdict"], found["home"]) == ("fits", "host")


def test_sgd_takes_a_moment_less(asked, capsys):
    """Of its momentum, in fp32; masters lie by themselves where torch steps them."""
    adamw, sgd = (
        answer(capsys, *asked, "--home", "disk", "--optimizer", name)["memory_bytes"]["disk"]
        for name in ("adamw", "SGD")
    )
    assert sgd["optimizer state"] == adamw["optimizer state"] / 2
    assert sgd["master weights"] > adamw["master weights"]


@pytest.mark.parametrize("text", ["lots", "0GB"])
def test_ram_is_a_size(text, asked, capsys):
    assert run(*asked, "--ram", text) == 2
    assert "--ram: " in capsys.readouterr().err


def test_exact_states_lose_nothing_first(asked, capsys):
    """18 bytes per parameter with gradients at home, 16.13 with split masters, 12.13 without gradients as well."""
    assert run(*asked, "--host-memory", "128GB", "--home", "host", "--masters", "separate") != 0
    wanted = "first try --masters split and --clip unit, with which it fits"
    assert wanted in capsys.readouterr().err
    assert run(*asked, "--host-memory", "128GB", "--home", "host") != 0
    assert "first try --clip unit, with which it fits" in capsys.readouterr().err
    named = ("--masters", "split", "--clip", "unit", "--resident", "none")
    found = answer(capsys, *asked, "--host-memory", "128GB", "--home", "host", *named)
    home = sum(
        found["memory_bytes"]["host"][name] for name in ("weights", "master weights", "optimizer state")
    )
    assert home == pytest.approx(12.125 * found["num_parameters"], rel=1e-3)


NODES = ("--nodes", 2, "--net", "25Gb")


def test_nobody_is_told_to_try_what_is_refused(asked, capsys):
    """A unit that is clipped by itself could not skip a step that overflows."""
    assert run(*asked, "--host-memory", "64GB", "--home", "host", "--dtype", "fp16") == 2
    assert "first try the home on disk" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "master", "moments"),
    [((), 4, 8), (("--masters", "split"), 2.125, 8), (("--optimizer-state", "int8"), 2, 2.03125)],
)
def test_nodes_share_any_state(options, master, moments, asked, capsys):
    found = answer(capsys, *asked, *NODES, "--ram", "512GB", "--home", "host", *options)
    host, count = found["memory_bytes"]["host"], found["num_parameters"]
    assert host["weights"] == pytest.approx(2 * count, rel=1e-3)
    assert host["master weights"] == pytest.approx(master * count / 2, rel=1e-3)
    assert host["optimizer state"] == pytest.approx(moments * count / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("ram", "advice"),
    [("100GB", "--masters split"), ("96GB", "--optimizer-state int8 and --masters split")],
)
def test_nodes_are_told_of_states_that_they_can_share(ram, advice, asked, capsys):
    """Masters and moments; gradients wait for the norm of all."""
    assert run(*asked, *NODES, "--ram", ram, "--home", "host") == 2
    assert f"first try {advice}, with which it fits" in capsys.readouterr().err


def test_nodes_take_the_norm_of_all_whether_they_clip_or_not(asked, capsys):
    """As a run does, in which ranks have to agree on what is skipped."""
    options = (*asked, *NODES, "--ram", "512GB", "--home", "host")
    clipped, unclipped = (answer(capsys, *options, "--max-grad-norm", norm) for norm in (1, 0))
    assert unclipped["step_s"] == clipped["step_s"]
    assert unclipped["memory_bytes"] == clipped["memory_bytes"]


def test_nodes_are_asked_about_another_state_as_one_is(asked, capsys):
    """With the home on disk for want of host memory."""
    model, *others = (option for option in asked if option != "--no-advice")
    found = answer(capsys, model, *others, "--host-memory", "64GB", *NODES)
    assert found["home"] == "disk"
    assert "state=int8" in [outcome["change"] for outcome in found["what_would_help"]]


@pytest.mark.parametrize("options", [("--clip", "none"), ("--max-grad-norm", 0)])
def test_nodes_agree_on_a_norm_that_nothing_is_clipped_to(options, asked, tmp_path, capsys):
    """As in a run, where no unit steps before all ranks know whether the step is skipped."""
    timeline = tmp_path / "timeline.json"
    answer(capsys, *asked, *NODES, *options, "--home", "disk", "--timeline", timeline)
    names = {event["name"].partition(" ")[0] for event in json.loads(timeline.read_text())["traceEvents"]}
    assert {"CLIP", "AGREE"} <= names


def test_each_gpu_of_several_nodes_has_a_process_with_its_share(asked, capsys):
    model, _, _, *others = asked
    found = answer(capsys, model, "--gpus", "4x4090", *others, *NODES)
    assert (found["nodes"], found["machine"]) == (8, "a GPU and 1/4 of 4x4090")
    one = answer(capsys, model, "--gpus", "4x4090", *others)
    assert found["budget_bytes"]["host"] == pytest.approx(one["budget_bytes"]["host"] / 4, rel=1e-3)


def test_adafactor_takes_four_bytes_and_room_for_the_largest_unit(asked, capsys):
    """Its scratch is one fp32 tensor of the vocabulary, beside the three that torch makes for itself."""
    asked = (*asked, "--host-memory", "72GB", "--home", "host", "--masters", "split")
    asked = (*asked, "--clip", "unit", "--optimizer", "Adafactor")
    found = answer(capsys, *asked)
    host, count = found["memory_bytes"]["host"], found["num_parameters"]
    assert host["weights"] + host["master weights"] == pytest.approx(4.125 * count, rel=1e-3)
    assert host["optimizer state"] < 0.005 * count
    assert host["optimizer scratch"] == 4 * 4 * 128256 * 4096
    assert sum(host.values()) < 72 * GB


@pytest.mark.parametrize("name", ["Adafactor", "muon"])
def test_whole_parameters_of_several_nodes_are_refused(name, asked, capsys):
    assert run(*asked, "--optimizer", name, "--nodes", "2", "--net", "25Gb") != 0
    assert f"{name} steps whole parameters" in capsys.readouterr().err


def test_muon_takes_a_moment_of_matrices_and_its_products_are_in_the_step(asked, capsys):
    """Six products of a matrix and its transpose for each of five iterations, by cores that nobody has measured."""
    asked = (*asked, "--host-memory", "128GB", "--home", "host", "--clip", "unit")
    muon, adamw = (
        answer(capsys, *asked, *options)
        for options in (("--optimizer", "muon", "--ns-on", "host"), ("--optimizer", "adamw"))
    )
    host, count, tables = muon["memory_bytes"]["host"], muon["num_parameters"], 2 * 128256 * 4096
    assert host["optimizer state"] == pytest.approx(4 * count + 4 * tables, rel=1e-3)
    assert host["optimizer scratch"] == 2 * 4 * 14336 * 4096
    attention, mlp = (
        2 * 6 * 4096**3 + 2 * (4 * 1024**2 * 4096 + 2 * 1024**3),
        3 * (4 * 14336 + 2 * 4096) * 4096**2,
    )
    products_s = 32 * 5 * (attention + mlp) / (16 * 40e9)
    assert products_s < muon["step_s"] < products_s + adamw["step_s"] + 10
    (figure,) = (f for f in muon["figures"] if f["name"] == "products on the host, of Muon")
    assert (figure["value"], figure["measured"]) == (16 * 40e9, False)
    assert not any("Muon" in figure["name"] for figure in adamw["figures"])


def test_muon_multiplies_on_the_gpu_where_that_shortens_a_step_and_has_room(asked, capsys):
    """16 cores multiply for 1,000 s; the GPU in a few, and the way up and down for 2 bytes each takes two."""
    asked = (*asked, "--ram", "256GB", "--cpu-cores", 16, "--optimizer", "muon")
    host, device, auto = (answer(capsys, *asked, "--ns-on", place) for place in ("host", "device", "auto"))
    adamw = answer(capsys, *asked, "--optimizer", "adamw")
    assert (host["products_on"], device["products_on"], auto["products_on"]) == ("host", "device", "device")
    assert auto["step_s"] == device["step_s"] < host["step_s"] / 10
    room = 2 * 2 * (14336 * 4096 + 4096**2) + 32 * 2**20
    assert auto["memory_bytes"]["device"]["products of Muon"] == room
    assert "products of Muon" not in host["memory_bytes"]["device"]
    (figure,) = (f for f in auto["figures"] if f["name"] == "products on 4090, of Muon")
    flops = host["step_s"] * 16 * 40e9
    assert auto["step_s"] - adamw["step_s"] > flops / figure["value"] * 0.9
    assert any("the STEP of a unit waits for its copies and products" in line for line in auto["assumptions"])
    adapters = answer(capsys, *asked, "--method", "lora")
    assert adapters["products_on"] == "host"  # which has the time: no step is shorter
    assert run(*asked, "--full") == 0
    assert "products of Muon" in capsys.readouterr().out


def test_muon_multiplies_on_the_host_where_the_gpu_has_no_room(asked, capsys):
    model, *machine, _, _ = asked
    asked = (model, *machine, "--microbatches", 64, "--tokens-per-step", 64 * 2048, "--ram", "256GB")
    found = answer(capsys, *asked, "--device-memory", "4.6GB", "--optimizer", "muon")
    assert (found["verdict"], found["products_on"]) == ("fits", "host")
    found = answer(capsys, *asked, "--device-memory", "5GB", "--optimizer", "muon")
    assert (found["verdict"], found["products_on"]) == ("fits", "device")


def test_muon_asked_onto_a_gpu_without_room_is_told_of_the_host(asked, capsys):
    asked = (*asked, "--ram", "256GB", "--optimizer", "muon", "--ns-on", "device")
    for gpus in ("4090", "2x4090"):
        assert run(*asked, "--gpus", gpus, "--device-memory", "1.6GB") != 0
        assert "first try --ns-on host, or " in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("is_host", "place"), [(False, "device"), (True, "host")])
def test_muon_multiplies_on_what_a_machine_file_has_beside_the_host(is_host, place, asked, capsys, tmp_path):
    """A run writes no generation of PCIe, of a GPU either."""
    machine, file = parse_gpus("4090"), tmp_path / "machine.json"
    gpus = (replace(machine.gpus[0], pcie_generation=0, is_host=is_host),)
    file.write_text(replace(machine, gpus=gpus).to_json())
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 2, "vocab_size": 8192}))
    found = answer(capsys, tmp_path, "--machine", file, "--no-advice", "--optimizer", "muon")
    assert found["products_on"] == place


def test_muon_multiplies_on_the_gpu_beside_a_home_that_fits_encoded_alone(asked, capsys):
    lora = ("--method", "lora", "--lora-r", 256, "--cpu-cores", 2, "--home", "host", "--host-memory", "17GB")
    asked = (*asked, "--optimizer", "muon", *lora, "--transport-weights", "auto")
    found, wanted = answer(capsys, *asked), answer(capsys, *asked, "--ns-on", "device")
    assert (found["products_on"], found["step_s"]) == ("device", wanted["step_s"])


def test_where_muon_multiplies_is_a_question_of_muon_alone(asked, capsys):
    assert answer(capsys, *asked, "--ram", "256GB")["products_on"] is None
    assert run(*asked, "--ns-on", "device") == 2
    assert "optimizer.ns_on: adamw has none" in " ".join(capsys.readouterr().err.split())


def share(found):
    """The row of a plan that says what products reach."""
    return next(row for row in found["figures"] if row["name"] == "share of the peak reached")


def test_liger_s_kernels_have_the_rate_of_fused_ones_and_keep_less(asked, capsys):
    found = {kind: answer(capsys, *asked, "--kernels", kind) for kind in ("eager", "fused", "liger")}
    eager, fused, liger = found.values()
    assert share(liger)["value"] == share(fused)["value"] > share(eager)["value"]
    assert "LLaMA-Factory's runs with Liger" in share(liger)["source"]
    assert liger["tokens_per_s"] >= fused["tokens_per_s"] > eager["tokens_per_s"]
    note = "model.kernels: liger has the rate of fused ones; what norms and activations keep less is counted"
    assert [note in one["assumptions"] for one in found.values()] == [False, False, True]
    assert [one["kernels"] for one in found.values()] == ["eager", "fused", "liger"]


@pytest.mark.parametrize(
    ("options", "row"),
    [
        (("--compile", "blocks"), "model.compile blocks, not priced"),
    ],
)
def test_what_has_no_source_is_not_priced(options, row, asked, capsys):
    plain, found = answer(capsys, *asked), answer(capsys, *asked, *options)
    assert share(found) == share(plain)
    (note,) = (line for line in found["assumptions"] if "is not priced: no sourced figure" in line)
    assert note.startswith(row.partition(",")[0].replace(" ", ": "))
    assert run(*asked, *options, "--full") == 0
    assert row in " ".join(capsys.readouterr().out.split())


def test_compiled_blocks_are_priced_on_the_card_of_which_a_gain_is_published(asked, capsys):
    model_dir, option, _, *rest = asked
    eager, compiled, fused = (
        answer(capsys, model_dir, option, "h100", *rest, *more)
        for more in ((), ("--compile", "blocks"), ("--kernels", "fused"))
    )
    assert share(compiled)["value"] == pytest.approx(share(eager)["value"] * 6667 / 5762)
    assert share(eager)["value"] < share(compiled)["value"] < share(fused)["value"]
    assert share(compiled)["source"].startswith("compiled blocks, 1.157 times eager ones: torchtitan")
    assert not any("not priced" in line for line in compiled["assumptions"])


def test_compiled_blocks_are_planned_whole(asked, capsys):
    model_dir, option, _, *rest = asked
    kept = [
        answer(capsys, model_dir, option, "h100", *rest, "--compile", how)["activations"]
        for how in ("off", "blocks")
    ]
    assert [any(choice.endswith("products") for choice in one) for one in kept] == [True, False]


def test_kernels_are_not_priced_where_products_were_measured_or_named(asked, tmp_path, capsys):
    model_dir, _, gpu, *rest = asked
    machine = tmp_path / "machine.json"
    machine.write_text(parse_gpus(gpu).to_json())
    for how in (("--machine", machine), ("--gpu-spec", "memory=24GB,tflops=165,gbps=1008,share=0.7")):
        found = answer(capsys, model_dir, *how, *rest, "--kernels", "liger")
        assert any(line.startswith("model.kernels: liger is not priced") for line in found["assumptions"])
    assert run(model_dir, "--machine", machine, "--kernels", "fused") == 2
    assert "eager and fused have no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "kernels", "compiles"),
    [
        (("--kernels", "liger"), "liger", "off"),
        (("--kernels", "fused", "--compile", "blocks"), "none", "blocks"),
        (("--compile", "blocks"), "none", "blocks"),
    ],
)
def test_a_run_has_the_kernels_that_were_planned(options, kernels, compiles, asked, tmp_path, capsys):
    answer(capsys, *asked, *options, "--output", tmp_path / "run.yaml")
    model = load_config(tmp_path / "run.yaml", []).model
    assert (model.kernels, model.compile) == (kernels, compiles)


def test_kernels_that_do_not_go_together_are_refused(asked, capsys):
    assert run(*asked, "--kernels", "liger", "--compile", "blocks") == 2
    assert "model.kernels: liger goes with model.compile: off" in " ".join(capsys.readouterr().err.split())
