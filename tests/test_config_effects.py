"""Settings without effect: every key of the schema says when it stands idle, and is silent nowhere else."""

from typing import Any

import pytest

from outsize.config import Config, Surroundings, load_config
from outsize.config.messages import all_keys
from outsize.config.section import idle_rows

ONE, SEVERAL = Surroundings(), Surroundings(num_processes=4)
DPO = "train.objective=dpo"
# By key: a value that is not the default; then where it has no effect, each way in which that can be.
CASES: dict[str, tuple[str, list[tuple[list[str], Surroundings]]]] = {
    "data.text_field": (
        "body",
        [
            (["data.format=messages"], ONE),
            ([], Surroundings(container="text")),
            ([], Surroundings(container="tokens")),
            ([DPO], ONE),
        ],
    ),
    "data.train_on": ("last", [([], Surroundings(container="text")), ([DPO], ONE)]),
    **{
        key: (value, [([DPO], ONE)])
        for key, value in {
            "data.format": "messages",
            "data.pack": "none",
            "data.prefetch": "3",
            "train.loss": "model",
            "train.on_stall": "report",
        }.items()
    },
    "data.group_by_length": ("true", [([], ONE), (["data.pack=none", DPO], ONE)]),
    **{
        f"data.{key}": (value, [([], Surroundings(masks=False)), ([DPO], ONE)])
        for key, value in {
            "mlm_probability": "0.3",
            "mask_replace_prob": "0.5",
            "random_replace_prob": "0.2",
        }.items()
    },
    "train.beta": ("0.2", [([], ONE), (["train.objective=reward"], ONE)]),
    "train.temperature": ("0.2", [([], ONE), ([DPO], ONE)]),
    "train.teacher": ("large", [([], ONE), ([DPO], ONE)]),
    **{
        f"data.{key}": (value, [([], Surroundings(container=kind)) for kind in ("text", "tokens")])
        for key, value in {
            "columns": "{prompt: question}",
            "roles": "{agent: assistant}",
            "template": "chatml",
            "max_bad_records": "3",
        }.items()
    },
    **{
        f"eval.{key}": (value, [([], ONE)])
        for key, value in {"every": "5", "sequences": "8", "keep_best": "false", "patience": "2"}.items()
    },
    "train.steps": ("7", [(["train.epochs=2"], ONE)]),
    "optimizer.min_lr": ("1e-6", [(["optimizer.schedule=linear"], ONE)]),
    "optimizer.decay_ratio": ("0.2", [([], ONE)]),
    "optimizer.restarts": ("3", [([], ONE)]),
    "data.workers": ("2", [(["data.prefetch=1"], ONE), ([DPO], ONE)]),
    "data.glob": ("a*", [([], Surroundings(one_file=True))]),
    "train.head_chunk_tokens": (
        "64",
        [(["train.loss=model"], ONE), ([], Surroundings(chunks_loss=False)), ([DPO], ONE)],
    ),
    "train.round_microbatches": ("4", [(["train.microbatches=3"], ONE), ([DPO], ONE)]),
    "train.save_every": ("100", [([], ONE)]),
    "train.save_total_limit": (
        "5",
        [
            (["train.save_minutes=0"], ONE),
            ([], Surroundings(home="disk")),
            (["train.save_minutes=0", "train.save_every=100"], SEVERAL),
        ],
    ),
    "train.program": ("mine.py:late", [([DPO], ONE)]),
    "train.resume": ("auto", [([], ONE)]),
    "train.profile_steps": ("1", [(["train.steps=2"], ONE), ([DPO], ONE)]),
    "train.stall_factor": ("20.0", [(["train.on_stall=ignore"], ONE), ([DPO], ONE)]),
    "train.stall_floor_s": ("20.0", [(["train.on_stall=ignore"], ONE), ([DPO], ONE)]),
    **{
        f"lora.{key}": (value, [([], ONE)])
        for key, value in {
            "r": "4",
            "from": "adapters",
            "lora_alpha": "4",
            "target_modules": "[up]",
            "target_parameters": "[up]",
            "bias": "all",
            "exclude_modules": "[up]",
            "use_rslora": "true",
            "modules_to_save": "[up]",
            "init_lora_weights": "gaussian",
            "rank_pattern": "{up: 2}",
            "alpha_pattern": "{up: 2}",
            "layers_to_transform": "[0]",
            "layers_pattern": "layers",
            "fan_in_fan_out": "true",
            "base_codec": "nf4",
            "table_codec": "nf4",
        }.items()
    },
    "lora.lora_dropout": ("0.1", [([], ONE), (["train.method=lora", DPO], ONE)]),
    "optimizer.max_grad_norm": ("2.0", [(["optimizer.clip=none"], ONE)]),
    "optimizer.clip": ("unit", [(["optimizer.max_grad_norm=0.0"], ONE)]),
    "optimizer.gradients": ("bf16", [(["optimizer.clip=unit"], ONE), (["optimizer.max_grad_norm=0.0"], ONE)]),
    "optimizer.masters": (
        "separate",
        [
            (["model.dtype=fp32"], ONE),
            (["model.dtype=fp16"], ONE),
            ([], Surroundings(dtype="fp32")),
            ([DPO], ONE),
        ],
    ),
    **{
        f"memory.{key}": (
            value,
            [(["memory.home=host"], ONE), ([], Surroundings(home="host"))],
        )
        for key, value in {"disk_memory": "1GiB", "store_dir": "/mnt"}.items()
    },
    "memory.commits": ("none", [(["memory.home=host"], ONE), ([], Surroundings(home="host")), ([DPO], ONE)]),
    **{
        f"memory.{key}": (
            value,
            [
                (["memory.device=emulated:2"], ONE),
                (["memory.device=cuda:0,1"], ONE),
                (["memory.device=cuda:all"], ONE),
                ([], Surroundings(device="cuda:0,1")),
            ],
        )
        for key, value in {"slots": "3", "prefetch": "1", "offload": "true"}.items()
    },
    "memory.tile_elements": (
        "4096",
        [(["memory.home=host"], ONE), ([], Surroundings(home="host"))],
    ),
    "memory.numa": ("off", [([], Surroundings(num_numa_nodes=1)), ([DPO], ONE)]),
    "memory.link_gb_per_s": (
        "4.0",
        [(["memory.device=cpu"], ONE)],
    ),
    "memory.peer_gb_per_s": ("4.0", [(["memory.device=cpu"], ONE), (["memory.device=emulated:1"], ONE)]),
    "transport.activations": ("int8", [(["memory.offload=false"], ONE)]),
    "parallel.timeout_s": ("5.0", [([], ONE)]),
    "parallel.gradients": ("bf16", [([], ONE)]),
    "parallel.handover": (
        "host",
        [([], ONE), (["memory.device=emulated:1"], ONE), (["memory.device=emulated:2", DPO], ONE)],
    ),
    "telemetry.project": ("mine", [([], ONE), (["telemetry.writers=[tensorboard]"], ONE)]),
    "telemetry.every": ("5", [([], ONE)]),
}
# By key: where the same value does something.
USED: dict[str, tuple[list[str], Surroundings]] = {
    "data.text_field": (["data.format=text"], Surroundings(container="json")),
    "data.glob": ([], Surroundings(one_file=False)),
    "data.group_by_length": (["data.pack=none"], ONE),
    **{f"eval.{key}": (["eval.split=0.1"], ONE) for key in ("every", "sequences", "keep_best", "patience")},
    "train.beta": ([DPO], ONE),
    "train.temperature": (["train.objective=embed"], ONE),
    "train.teacher": (["train.objective=distill"], ONE),
    "optimizer.decay_ratio": (["optimizer.schedule=wsd"], ONE),
    "optimizer.restarts": (["optimizer.schedule=cosine_restarts"], ONE),
    "train.head_chunk_tokens": ([], Surroundings(chunks_loss=True)),
    "train.save_every": (["train.steps=101"], ONE),
    "train.save_total_limit": ([], Surroundings(home="host")),
    "train.resume": (["train.run_dir=run"], ONE),
    "optimizer.gradients": (["optimizer.clip=none", "train.on_nonfinite=skip"], ONE),
    "optimizer.masters": ([], Surroundings(dtype="bf16")),
    "memory.numa": ([], Surroundings(num_numa_nodes=2)),
    "memory.tile_elements": (["optimizer.clip=unit"], Surroundings(home="host")),
    "memory.link_gb_per_s": (["memory.device=emulated"], ONE),
    "memory.peer_gb_per_s": (["memory.device=emulated:2"], ONE),
    "transport.activations": (["memory.offload=true"], ONE),
    "parallel.timeout_s": ([], SEVERAL),
    "parallel.gradients": ([], SEVERAL),
    "parallel.handover": (["memory.device=emulated:2"], ONE),
    "telemetry.project": (["telemetry.writers=[trackio]"], ONE),
    "telemetry.every": (["telemetry.writers=[tensorboard]"], ONE),
    **{key: (["train.method=lora"], ONE) for key in CASES if key.startswith("lora.")},
}


def noted(key: str, value: str, others: list[str], around: Surroundings) -> bool:
    settings = ["model.path=m", "data.path=d", *others, f"{key}={value}"]
    notes = load_config(None, settings, environ={}).notes(around)
    assert len(notes) == len(set(notes))
    return any(note.startswith(f"{key} has no effect: ") for note in notes)


def test_the_table_has_a_row_for_every_key_and_none_besides():
    assert [key for key, _ in idle_rows(Config)] == all_keys()


def test_every_row_that_says_something_is_tried():
    assert sorted(key for key, row in idle_rows(Config) if row) == sorted(CASES)
    assert all(len(CASES[key][1]) >= 1 for key in CASES)


@pytest.mark.parametrize("key", CASES)
def test_a_setting_without_effect_is_noted_and_one_with_an_effect_is_not(key: str):
    value, idle = CASES[key]
    for others, around in idle:
        assert noted(key, value, others, around), (others, around)
    others, around = USED.get(key, ([], ONE))
    assert not noted(key, value, others, around)


@pytest.mark.parametrize("around", [ONE, SEVERAL, Surroundings(home="host", device="cpu", dtype="fp32")])
def test_defaults_are_never_noted(around: Surroundings):
    config: Any = Config(model={"path": "m"}, data={"path": "d"})
    assert config.notes(around) == []
