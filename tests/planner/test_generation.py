"""What writing text is predicted to take: oracles are sums over units by hand, and what the engine itself keeps."""

import json

import pytest

import outsize
from cli.test_plan import answer, run
from outsize.hardware.cards import parse_gpus

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "moe_intermediate_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Configs of a dense model and of a mixture."""
    paths = {}
    for name, config in (("dense", LLAMA), ("mixture", MIXTURE)):
        paths[name] = tmp_path_factory.mktemp(name)
        (paths[name] / "config.json").write_text(json.dumps(config))
    return paths


def wrote(path, **options):
    """Ask about text on a 4090 beside enough memory."""
    options = {"gpus": "4090", "ram": "256GB", "seq_len": 512, **options}
    return outsize.predict(path, generate=True, **options)


def test_what_moves_and_what_stays_is_a_sum_by_hand(models):
    all_there = wrote(models["dense"])
    assert (all_there.bytes_per_pass, all_there.break_even_texts) == (0, None)
    assert all_there.kept_units == all_there.units == 33  # blocks and head: of the embedding rows come up
    gpu = parse_gpus("4090").gpus[0]
    block = 2 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096)
    head = 2 * (32000 * 4096 + 4096)
    assert all_there.cache_bytes == 32 * 2 * 8 * 128 * 2 * (512 + 128)
    reads = (32 * block + head + 32 * 2 * 8 * 128 * 2 * (512 + 64)) / gpu.memory_bytes_per_s.value
    assert all_there.pass_s == pytest.approx(reads, rel=1e-3)
    some = wrote(models["dense"], device_memory="8GiB")
    blocks = 33 - some.kept_units - 1
    assert some.bytes_per_pass == pytest.approx(
        blocks * block + head, rel=1e-3
    )  # the head, smaller, moves too
    assert "link" in some.ends_it
    assert some.break_even_texts > 1


def test_more_memory_and_more_texts_are_never_slower(models):
    speeds = [wrote(models["dense"], device_memory=f"{gib}GiB").tokens_per_s for gib in (3, 6, 10, 14, 18)]
    assert speeds == sorted(speeds)
    at_once = [wrote(models["dense"], device_memory="8GiB", batch_size=count) for count in (1, 4, 16, 64)]
    assert [each.tokens_per_s for each in at_once] == sorted(each.tokens_per_s for each in at_once)
    assert len({each.weight_bytes for each in at_once}) == 1


def test_of_a_mixture_the_chosen_experts_come_up_alone(models):
    one, many = (
        wrote(models["mixture"], device_memory="1GiB", seq_len=16, batch_size=count) for count in (1, 64)
    )
    experts = 8 * 64 * 3 * 1024 * 768 * 2
    assert one.expert_bytes == pytest.approx(experts, rel=0.01)
    kept = one.kept_expert_bytes / one.expert_bytes
    assert one.bytes_per_pass == pytest.approx(experts * 4 / 64 * (1 - kept), rel=0.02)
    assert many.bytes_per_pass > 10 * one.bytes_per_pass  # by then nearly all of them are chosen
    assert "experts" in one.assumptions[-1]


def test_where_weights_rest_decides_what_they_come_up_at(models):
    host, disk = (wrote(models["dense"], device_memory="6GiB", home=home) for home in ("host", "disk"))
    assert (host.home, disk.home) == ("host", "disk")
    assert disk.tokens_per_s < host.tokens_per_s
    assert "disk" in disk.ends_it
    coded = wrote(models["dense"], device_memory="6GiB", method="lora", base_codec="nf4")
    assert coded.weight_bytes < 0.4 * host.weight_bytes
    assert coded.tokens_per_s > 2 * host.tokens_per_s
    with pytest.raises(outsize.InfeasiblePlanError, match="--ram"):
        wrote(models["dense"], ram="8GB", disk="none")


def test_the_command_says_it_and_refuses_what_is_of_training(models, capsys):
    options = (models["dense"], "--gpus", "4090", "--generate", "--seq-len", 512, "--device-memory", "8GiB")
    said = answer(capsys, *options)
    assert said["kind"] == "generation"
    assert said["tokens_per_s"] == pytest.approx(wrote(models["dense"], device_memory="8GiB").tokens_per_s)
    assert run(*options) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "break-even" in text
    assert "first token after" in text
    for wrong, says in (
        (("--compare",), "--compare: of training"),
        (("--tokens", "1B"), "--tokens: of training"),
        (("--data", "chats.jsonl", "--clip", "unit"), "--clip, --data: of training"),
        (("--max-new-tokens", 8000), "positions"),
        (("--batch-size", 0), "at least one text"),
    ):
        assert run(*options, *wrong) == 2
        assert says in " ".join(capsys.readouterr().err.split())


def test_options_of_writing_are_refused_where_training_is_asked_about(models, capsys):
    assert run(models["dense"], "--gpus", "4090", "--batch-size", 4) == 2
    assert "--batch-size: of --generate; a step of training has --tokens-per-step" in " ".join(
        capsys.readouterr().err.split()
    )
    with pytest.raises(outsize.ConfigError, match="--max-new-tokens: of --generate"):
        outsize.predict(models["dense"], gpus="4090", max_new_tokens=9)


def test_of_several_gpus_one_writes_and_that_is_said(models):
    one, two = (wrote(models["dense"], gpus=gpus, device_memory="8GiB") for gpus in ("4090", "2x4090"))
    assert "others are idle" in two.assumptions[1]
    assert not any("others are idle" in each for each in one.assumptions)


def test_a_prediction_of_training_knows_its_data(models, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "abcd efgh ijkl"}\n' * 4000)
    options = {"gpus": "4090", "tokens_per_step": 4096, "seq_len": 512, "ram": "64GB"}
    one, three = (
        outsize.predict(models["mixture"], data=str(data), epochs=epochs, **options) for epochs in (1, 3)
    )
    assert (one.tokens, three.tokens) == (pytest.approx(14000), pytest.approx(42000))
    assert three.steps == -(-42000 // 4096)
    assert three.eta_s == three.steps * three.step_s
    on_disk = outsize.predict(models["mixture"], tokens="1M", home="disk", **options)
    assert on_disk.disk_written_bytes == on_disk.steps * on_disk.plan.traffic.disk_written > 0


@pytest.mark.parametrize(("ram", "codec"), [("18GB", "int8"), ("9GB", "nf4")])
def test_a_base_that_does_not_fit_is_to_be_encoded_and_then_fits(models, ram, codec):
    """Of adapters the optimizer's state is small: a smaller one was advised, and gained nothing."""
    options = {"gpus": "4090", "ram": ram, "seq_len": 128, "tokens_per_step": 1024, "home": "host"}
    with pytest.raises(outsize.InfeasiblePlanError, match=f"first try lora.base_codec={codec}"):
        outsize.predict(models["dense"], method="lora", **options)
    assert outsize.predict(models["dense"], method="lora", base_codec=codec, **options).home == "host"


def test_weights_come_no_faster_than_through_the_switch_that_a_card_is_behind(models, tmp_path):
    """So a break-even has as many more texts."""
    machine = {"gpus": "2x4090", "ram": "256GB"}
    slow = {"switches": {"plx": {"uplink": "5GB", "gpus": [0, 1]}}}
    answers = []
    for name, fields in (("alone", machine), ("behind", {**machine, **slow})):
        (tmp_path / f"{name}.yaml").write_text(json.dumps(fields))
        asked = {"gpus": None, "ram": None, "machine": tmp_path / f"{name}.yaml"}
        answers.append(wrote(models["dense"], device_memory="8GiB", **asked))
    alone, behind = answers
    assert behind.first_token_s > 1.5 * alone.first_token_s
    assert behind.break_even_texts > 1.5 * alone.break_even_texts
