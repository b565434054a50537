import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from outsize.config import Config, dump_config, load_config, parse_config
from outsize.config.messages import all_keys, suggest
from outsize.errors import ConfigError

PATHS = {"model.path": "model", "data.path": "data"}
ROOT = Path(__file__).parent.parent


def load(*overrides, path=None, environ=None, **flags):
    given_flags = {key.replace("__", "."): value for key, value in flags.items()}
    return load_config(path, overrides, {**PATHS, **given_flags}, environ or {})


def mistake(*overrides, **kwargs):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **kwargs)
    return str(caught.value)


# --- where values come from ---------------------------------------------------------------------------------


def test_two_paths_are_enough():
    config = load()
    assert config.model.path == "model"
    assert config.train.steps == 100
    assert config.tokens_per_step == config.data.seq_len == 512


def test_flags_win_over_set_over_environment_over_file_over_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 1, seed: 1, microbatches: 1, save_every: 1}\ndata: {seq_len: 64}\n")
    environ = {
        "OUTSIZE_TRAIN__SEED": "2",
        "OUTSIZE_TRAIN__MICROBATCHES": "2",
        "OUTSIZE_TRAIN__SAVE_EVERY": "2",
    }
    config = load(
        "train.microbatches=3", "train.save_every=3", path=file, environ=environ, train__save_every=4
    )
    train = config.train
    assert (train.steps, train.seed, train.microbatches, train.save_every) == (1, 2, 3, 4)
    assert config.data.seq_len == 64
    assert config.data.pack == "stream"


def test_what_comes_first_ends_what_a_place_behind_says_in_another_way(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: {epochs: 2, batch_size: 3}\ndata: {seq_len: 8}")
    train = load(path=file, **{"train.steps": 5, "train.tokens_per_step": 16}).train
    assert (train.steps, train.epochs, train.tokens_per_step, train.batch_size) == (5, None, 16, None)
    assert load("train.steps=5", path=file).train.epochs is None
    both = load(
        "train.steps=5", **{"train.epochs": 2.0}
    ).train  # of one command line: a note says which counts
    assert (both.epochs, both.steps) == (2, 5)


def test_a_flag_that_was_not_given_changes_nothing(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  steps: 7\n")
    assert load(path=file, train__steps=None).train.steps == 7


def test_the_last_set_wins():
    assert load("train.steps=3", "train.steps=4").train.steps == 4


def test_an_empty_file_and_an_empty_section_mean_the_defaults(tmp_path):
    file = tmp_path / "run.yaml"
    for text in ("", "train:\nmemory:\n", "# nothing\n"):
        file.write_text(text)
        assert load(path=file) == load()


def test_values_are_written_as_in_yaml():
    config = load("optimizer.lr=2e-5", "data.pack=false", "optimizer.betas=[0.8, 0.95]", "memory.slots=null")
    assert config.optimizer.lr == 2e-5
    assert config.data.pack == "none"
    assert config.optimizer.betas == (0.8, 0.95)
    assert config.memory.slots is None


@pytest.mark.parametrize(
    ("text", "value"), [("1:30", "1:30"), ("2024-05-01", "2024-05-01"), ("emulated:2", None)]
)
def test_times_and_dates_are_text(text, value):
    assert load(f"train.run_dir={text}").train.run_dir == (value or text)


def test_environment_variables_that_concern_something_else_are_left_alone():
    assert load(environ={"OUTSIZE_DEBUG": "1", "HOME": "/", "OUTSIZE": "x"}) == load()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("OUTSIZE_TRAIN__STEP", "OUTSIZE_TRAIN__STEPS"),
        ("OUTSIZE_TRAIN_STEPS", "OUTSIZE_TRAIN__STEPS"),
        ("OUTSIZE_TRIAN__STEPS", "OUTSIZE_TRAIN__STEPS"),
        ("OUTSIZE_TRAIN__SEQ_LEN", "OUTSIZE_DATA__SEQ_LEN"),
    ],
)
def test_a_misspelled_environment_variable_is_an_error(name, meant):
    assert mistake(environ={name: "8"}) == f"{name}: no such environment variable; did you mean {meant}?"


# --- mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.step", "train.steps"),
        ("trian.steps", "train.steps"),
        ("train.seq_len", "data.seq_len"),
        ("steps", "train.steps"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("data.batch_size", "train.batch_size"),
        ("train.gradient_checkpointing", "memory.activations"),
        ("train.accumulate_grad_batches", "train.microbatches"),
        ("memory.device_mem", "memory.device_memory"),
        ("trian", "train"),
    ],
)
def test_an_unknown_key_is_an_error_with_a_suggestion(key, meant):
    assert suggest(key) == meant
    assert mistake(f"{key}=1").startswith(f"{key.partition('.')[0]}")
    assert f"no such key; did you mean {meant.partition('.')[0]}" in mistake(f"{key}=1")


def test_an_unknown_key_of_a_known_section_is_named_in_full():
    assert mistake("train.step=1") == (
        "train.step: no such key; did you mean train.steps? (from --set train.step=1)"
    )


def test_a_key_like_no_other_points_to_the_documentation():
    assert "no such key; see docs/configuration.md" in mistake("train.zzzzz=1")
    assert mistake("lora.use_dora=true").endswith(
        "no such key: DoRA is not supported (from --set lora.use_dora=true)"
    )
    for name in ("whole_word_mask", "mlm_whole_word"):
        assert f"data.{name}: no such key: whole words are not masked as one" in mistake(f"data.{name}=true")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=ten", "train.steps: must be a whole number, not 'ten'"),
        ("train.steps=3.0", "train.steps: must be a whole number, not 3.0"),
        ("train.steps=true", "train.steps: must be a whole number, not true"),
        ("train.steps=null", "train.steps: must be a whole number, not null"),
        ("train.steps=0", "train.steps: must be at least 1, not 0"),
        ("optimizer.lr=fast", "optimizer.lr: must be a number, not 'fast'"),
        ("optimizer.lr=.nan", "optimizer.lr: must be a finite number, not nan"),
        ("optimizer.eps=0", "optimizer.eps: must be above 0, not 0"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1: must be below 1, not 1.0"),
        ("optimizer.betas=[0.9]", "optimizer.betas.1: is missing: the list is too short"),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "optimizer.betas: must hold 2 values, not 3"),
        ("data.pack=1", "data.pack: must be stream, documents or none, not '1'"),
        ("train.deterministic=1", "train.deterministic: must be true or false, not 1"),
        ("data.glob=''", "data.glob: must not be empty"),
        ("data.path=[3]", "data.path: must be text, not ['3']"),
        ("model.freeze=embed", "model.freeze: must be a list, not 'embed'"),
        ("model.dtype=bfloat16", "model.dtype: must be auto, fp32, bf16 or fp16, not 'bfloat16'"),
        (
            "memory.device=gpu",
            "memory.device: not a device: 'gpu'; write cpu, cuda, cuda:1, cuda:0,1, cuda:all, emulated:2 or auto "
            "(xpu and npu as cuda)",
        ),
        (
            "memory.device=mps",
            "memory.device: mps computes nothing here: its memory is the host's, so that nothing would be streamed",
        ),
        ("memory.device=emulated:0", "memory.device: not a device: 'emulated:0'"),
        ("memory.device_memory=lots", "memory.device_memory: not a size: 'lots'; write a number and a unit"),
        ("memory.device_memory=true", "memory.device_memory: not a size; write a number and a unit"),
        ("memory.device_memory='160'", "memory.device_memory: 160 without a unit is 160 bytes; write 160MiB"),
        ("memory.host_memory=0", "memory.host_memory: a size must be above zero"),
        ("memory.tile_elements=3000", "memory.tile_elements: must be a multiple of 2048, not 3000"),
        (
            "transport.weights=fp8",
            "transport.weights: must be raw, auto, lossless4 or lossless3, not 'fp8'; weights that train keep "
            "every bit, and frozen ones rest and cross in fewer by base_codec (section lora)",
        ),
        ("train=3", "train: is a section: write its keys below it, not 3"),
    ],
)
def test_a_wrong_value_is_named_in_plain_words(override, words):
    overrides, flags = [override], {}
    if override.startswith("data.path"):
        flags = {"data__path": None}
    message = mistake(*overrides, **flags)
    assert message.startswith(words)
    assert message.endswith(f"(from --set {override})")
    assert "\n" not in message


def test_a_mistake_names_the_file_or_variable_that_it_stands_in(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  steps: ten\n")
    assert mistake(path=file).endswith(f"(from {file})")
    assert mistake(environ={"OUTSIZE_TRAIN__STEPS": "ten"}).endswith("(from OUTSIZE_TRAIN__STEPS)")
    assert mistake(train__steps=0).endswith("(from the command line)")


def test_a_file_with_a_wrong_section_is_not_mended_by_a_flag(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train: 3\n")
    assert "train: is a section" in mistake(path=file, train__steps=5)


def test_all_mistakes_are_reported_at_once():
    message = mistake("train.steps=ten", "data.pack=maybe", "memory.homme=disk")
    assert message.splitlines()[0] == "3 mistakes in the configuration:"
    assert len(message.splitlines()) == 4


def test_what_is_required_says_how_to_give_it():
    with pytest.raises(ConfigError, match=r"model\.path: is required; pass --model DIR"):
        load_config(environ={}, flags={"data.path": "data"})


@pytest.mark.parametrize("text", ["train.steps", "=3", ""])
def test_set_needs_a_key_and_a_value(text):
    assert "write it as section.key=value" in mistake(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train: [", "line 1: "),
        ("train:\n  steps: 1\n  steps: 2\n", "line 3: the key 'steps' is given twice"),
        ("train:\n  [1, 2]: 3\n", "unhashable key"),
        ("- a\n- b\n", "expected sections such as 'train:'"),
        ("train: {steps: !!python/object:os.system 1}", "could not determine a constructor"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, words):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    message = mistake(path=file)
    assert message.startswith(str(file))
    assert words in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    assert "No such file" in mistake(path=tmp_path / "none.yaml")
    assert "Is a directory" in mistake(path=tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in mistake(path=tmp_path / "binary.yaml")


def test_each_optimizer_has_defaults_of_its_own_and_reads_back_as_written(tmp_path):
    names = ("adamw", "SGD", "RMSprop", "Adafactor", "muon")
    adamw, sgd, rmsprop, adafactor, muon = (load(f"optimizer.name={name}") for name in names)
    assert (adamw.optimizer.betas, adamw.optimizer.weight_decay) == ((0.9, 0.999), 0.01)
    assert (sgd.optimizer.args, sgd.optimizer.weight_decay) == ({"momentum": 0.9}, 0.0)
    assert (rmsprop.optimizer.args, rmsprop.optimizer.weight_decay) == ({}, 0.0)
    assert (adafactor.optimizer.lr, adafactor.optimizer.weight_decay) == (1e-2, 0.0)
    assert (muon.optimizer.momentum, muon.optimizer.nesterov, muon.optimizer.weight_decay) == (
        0.95,
        True,
        0.1,
    )
    assert load("optimizer.name=SGD", "optimizer.weight_decay=0.3").optimizer.weight_decay == 0.3
    of_args = load("optimizer.name=SGD", "optimizer.args={momentum: 0.5, nesterov: true}")
    assert of_args.optimizer.args == {"momentum": 0.5, "nesterov": True}
    for config in (adamw, sgd, rmsprop, adafactor, muon, of_args):
        (tmp_path / "run.yaml").write_text(dump_config(config))
        assert load(path=tmp_path / "run.yaml") == config


# --- combinations -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.tokens_per_step=1000"], "1000 is not a multiple of data.seq_len (512); try 512 or 1024"),
        (["train.tokens_per_step=256"], "256 is not a multiple of data.seq_len (512); try 512 or 1024"),
        (["train.tokens_per_step=1024", "train.microbatches=3"], "3 microbatches need as many sequences"),
        (["train.steps=10", "optimizer.warmup_steps=10"], "10 steps of warm-up do not fit"),
        (["train.steps=1", "optimizer.warmup_ratio=0.9"], "1 steps of warm-up do not fit"),
        (["optimizer.warmup_steps=5", "optimizer.warmup_ratio=0.1"], "not both"),
        (["memory.slots=2", "memory.prefetch=2"], "need 3 slots, but memory.slots is 2"),
        (["optimizer.name=SGD", "optimizer.eps=1e-6"], "optimizer.eps: SGD has none; leave it out, set"),
        (
            ["optimizer.name=Adam", "optimizer.betas=[0.8, 0.9]"],
            "optimizer.name=adamw or muon, or say what a class takes in optimizer.args",
        ),
        (
            ["optimizer.ns_steps=3"],
            "optimizer.ns_steps: adamw has none; leave it out, or set optimizer.name=muon",
        ),
        (
            ["optimizer.ns_on=device"],
            "optimizer.ns_on: adamw has none; leave it out, or set optimizer.name=muon",
        ),
        (["optimizer.adjust_lr_fn=original"], "optimizer.adjust_lr_fn: adamw has none"),
        (['optimizer.groups=[{params: ["*"], muon: false}]'], "optimizer.groups: muon: adamw is another"),
        (["optimizer.name=Adam", "optimizer.momentum=0.5"], "optimizer.momentum: Adam has none"),
        (["optimizer.args={amsgrad: true}"], "optimizer.args: adamw takes no amsgrad; say its settings"),
        (["optimizer.nesterov=false"], "optimizer.nesterov: adamw has none"),
        (["optimizer.name=Adafactor", "optimizer.state=int8"], "optimizer.state: Adafactor has none"),
        (["optimizer.name=Adafactor", "optimizer.eps=1e-6"], "optimizer.eps: Adafactor has none"),
        (["optimizer.clip=unit", "train.on_nonfinite=skip"], "needs them; use optimizer.clip=global"),
        (
            ["optimizer.masters=split", "model.dtype=fp32"],
            "only those of bf16 weights can be split, not fp32",
        ),
        (
            ["optimizer.masters=split24", "model.dtype=fp16"],
            "only those of bf16 weights can be split, not fp16",
        ),
    ],
)
def test_combinations_that_cannot_be_are_refused(overrides, words):
    assert words in mistake(*overrides)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["memory.device=cpu", "memory.link_gb_per_s=4"], "memory.link_gb_per_s"),
        (["memory.home=host", "memory.store_dir=/mnt"], "memory.store_dir"),
        (["memory.home=host", "memory.tile_elements=4096"], "memory.tile_elements"),
        (["train.loss=model", "train.head_chunk_tokens=64"], "train.head_chunk_tokens"),
        (["train.resume=auto"], "train.resume"),
        (["train.save_every=100"], "train.save_every"),
        (["data.format=messages", "data.text_field=body"], "data.text_field"),
        (["memory.offload=false", "transport.activations=int8"], "transport.activations"),
        (["optimizer.clip=unit", "optimizer.gradients=bf16"], "optimizer.gradients"),
        (["optimizer.clip=none", "optimizer.max_grad_norm=2.0"], "optimizer.max_grad_norm"),
        (["optimizer.clip=unit", "optimizer.max_grad_norm=0.0"], "optimizer.clip"),
        (["train.on_stall=ignore", "train.stall_factor=20"], "train.stall_factor"),
        (["train.on_stall=ignore", "train.stall_floor_s=20"], "train.stall_floor_s"),
    ],
)
def test_a_setting_without_effect_is_noted(overrides, key):
    (note,) = load(*overrides).notes()
    assert note.startswith(f"{key} has no effect: ")


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["memory.device=emulated:2", "memory.link_gb_per_s=4"],
        ["memory.home=disk", "memory.store_dir=/mnt"],
        ["train.resume=auto", "train.run_dir=run"],
        ["data.format=text", "data.text_field=body"],
        ["memory.device=emulated:2", "memory.activations=recompute"],
        ["memory.device=emulated:2", "memory.activations=keep"],
        ["memory.device=emulated:1", "memory.offload=false"],
        ["optimizer.clip=none", "optimizer.gradients=bf16", "train.on_nonfinite=skip"],
        ["optimizer.clip=none", "optimizer.gradients=bf16", "model.dtype=fp16"],
        ["optimizer.clip=none", "optimizer.gradients=bf16", "transport.gradients=int8"],
    ],
)
def test_settings_with_effect_are_not_noted(overrides):
    assert load(*overrides).notes() == []


def test_inputs_that_workers_hand_over_go_encoded_whatever_offload_says():
    several = load("memory.device=emulated:2", "memory.offload=false", "transport.activations=int8").notes()
    assert [note.partition(" ")[0] for note in several] == ["memory.offload"]


def test_what_follows_from_other_keys():
    config = load("data.seq_len=128", "train.microbatches=4", "train.steps=200", "optimizer.warmup_ratio=0.1")
    assert config.tokens_per_step == 512
    assert config.sequences_per_step == 4
    assert config.warmup_steps == 20
    assert load("train.steps=20", "optimizer.warmup_ratio=0.06").warmup_steps == 2  # as transformers has it


# --- the object ---------------------------------------------------------------------------------------------


def test_a_configuration_does_not_change():
    config = load()
    with pytest.raises(ValidationError, match="frozen"):
        config.train.steps = 5


def test_a_path_object_is_a_path():
    config = parse_config({"model": {"path": Path("a") / "b"}, "data": {"path": "c"}})
    assert config.model.path == "a/b"


@given(
    lr=st.floats(min_value=0, max_value=10),
    eps=st.floats(min_value=1e-30, max_value=1),
    budget=st.one_of(st.none(), st.integers(min_value=1, max_value=2**50)),
    run_dir=st.one_of(st.none(), st.text(min_size=1, max_size=20)),
    freeze=st.lists(st.text(max_size=8), max_size=3),
    offload=st.sampled_from([None, True, False]),
)
def test_what_is_dumped_loads_to_the_same_configuration(
    tmp_path_factory, lr, eps, budget, run_dir, freeze, offload
):
    config = parse_config(
        {
            "model": {"path": "m", "freeze": freeze},
            "data": {"path": "d"},
            "train": {"run_dir": run_dir},
            "optimizer": {"lr": lr, "eps": eps},
            "memory": {"device_memory": budget, "offload": offload},
        }
    )
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    assert load_config(file, environ={}) == config


@pytest.mark.parametrize(
    "text", ["1e5", "0x10", "1:30", "2024-05-01", "0123", "12", "yes", "null", "~", "é", "a: b"]
)
def test_text_that_looks_like_something_else_survives(tmp_path, text):
    config = load(train__run_dir=text)
    (tmp_path / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "config.yaml", environ={}).train.run_dir == text


def test_sizes_are_dumped_as_people_write_them():
    assert "device_memory: 64MiB" in dump_config(load("memory.device_memory=64MiB"))
    assert "device_memory: 24000000001" in dump_config(load("memory.device_memory=24000000001"))


def test_every_key_says_what_it_means():
    for name, section in Config.model_fields.items():
        for key, field in section.annotation.model_fields.items():
            assert field.description, f"{name}.{key}"
            assert field.description.endswith((".", ")")), f"{name}.{key}"
    assert len(all_keys()) == len(set(all_keys()))


def test_the_documentation_is_current():
    script = ROOT / "scripts" / "configuration_page.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


LISTS = {
    "lora.target_modules": ("q_proj,v_proj", ("q_proj", "v_proj")),
    "lora.target_parameters": (
        "experts.gate_up_proj, experts.down_proj",
        ("experts.gate_up_proj", "experts.down_proj"),
    ),
    "lora.exclude_modules": ("k_proj,o_proj", ("k_proj", "o_proj")),
    "lora.modules_to_save": ("lm_head,on", ("lm_head", "on")),
    "lora.layers_to_transform": ("0,2", (0, 2)),
    "lora.layers_pattern": ("layers,blocks", ("layers", "blocks")),
    "model.freeze": ("*.embed*,lm_head*", ("*.embed*", "lm_head*")),
    "optimizer.betas": ("0.8,0.95", (0.8, 0.95)),
    "telemetry.writers": ("wandb,trackio", ("wandb", "trackio")),
}
OF_SECTIONS = {"data.more", "optimizer.groups"}


def test_names_with_commas_are_a_list_for_every_key_that_takes_one():
    """On the command line and in the environment; entries that are sections of their own need the words of YAML."""
    takes = {
        f"{section}.{key}"
        for section, field in Config.model_fields.items()
        for key, about in field.annotation.model_json_schema()["properties"].items()
        if "array" in {about.get("type"), *(one.get("type") for one in about.get("anyOf", ()))}
    }
    assert takes == LISTS.keys() | OF_SECTIONS
    for key, (text, want) in LISTS.items():
        section, _, name = key.partition(".")
        method = ["train.method=lora"] if section == "lora" else []
        needed = [
            *method,
            "model.path=m",
            "data.path=d",
            *(["lora.layers_pattern=layers"] if name == "layers_to_transform" else []),
            *(["lora.layers_to_transform=[0]"] if name == "layers_pattern" else []),
        ]
        variable = f"OUTSIZE_{section.upper()}__{name.upper()}"
        for config in (
            load_config(overrides=[*needed, f"{key}={text}"], environ={}),
            load_config(overrides=needed, environ={variable: text}),
            load_config(overrides=[*needed, f"{key}={list(want)}"], environ={}),
        ):
            assert getattr(getattr(config, section), name) == want


def test_a_regular_expression_with_a_comma_stays_one():
    pattern = r"layers\.[0-9]{1,2}\.q_proj"
    config = load_config(
        overrides=["train.method=lora", "model.path=m", "data.path=d", f"lora.target_modules={pattern}"],
        environ={},
    )
    assert config.lora.target_modules == pattern


@pytest.mark.parametrize(
    ("key", "former", "value", "said"),
    [
        ("mode", "stream", "ddp", "plain data parallel is no more: ranks stream"),
        ("weights", "raw", "delta", "sent as they are"),
        ("ddp_compress", "none", "fp16", "as parallel.gradients says"),
    ],
)
def test_keys_that_are_no_more_are_read_where_they_changed_nothing_and_else_refused(key, former, value, said):
    """config.yaml of a run holds all keys that there were: it is gone on with."""
    tree = {"model": {"path": "m"}, "data": {"path": "d"}}
    assert parse_config({**tree, "parallel": {key: former}}) == parse_config(tree)
    with pytest.raises(ConfigError, match=f"parallel.{key}: no such key: .*{said}"):
        parse_config({**tree, "parallel": {key: value}})
