"""What is measured before a run is what the run does."""

import json
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from outsize import user_cache
from outsize.runtime.trial.trial_pass import TrialPass
from outsize.session.job.known_models import has_unversioned_code
from outsize.session.job.prepare import prepare
from outsize.streamed.spec import RunSpec
from support import make_run


def measured(directory: Path, sections: Any = None, **data: Any) -> Any:
    run = RunSpec.of(make_run(directory, data=data, **(sections or {})), directory)
    return prepare(run, lambda _: None).measured


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[TrialPass]:
    """Passes of trials, of which none is remembered to begin with."""
    ran: list[TrialPass] = []
    of_class = TrialPass.run

    def run(self: TrialPass, weights: torch.UntypedStorage) -> Any:
        ran.append(self)
        return of_class(self, weights)

    monkeypatch.setattr(TrialPass, "run", run)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ran


def test_where_sequences_may_be_padded_the_mask_is_measured(tmp_path: Path):
    """Models of transformers make one only where something is padded."""
    padded, full = measured(tmp_path, pack="none"), measured(tmp_path)
    assert measured(tmp_path, pack="documents").held_bytes >= padded.held_bytes
    assert padded.held_bytes > full.held_bytes
    assert padded.needed.keys() == full.needed.keys()
    assert all(padded.needed[unit].num_saved > full.needed[unit].num_saved for unit in full.needed)


def test_a_second_run_begins_with_what_the_first_has_tried(tmp_path: Path, passes: list[TrialPass]):
    first = measured(tmp_path)
    count = len(passes)
    assert count
    assert measured(tmp_path) == first
    assert len(passes) == count


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"dtype": "bf16"}},
        {"model": {"attention": "eager"}},
        {"train": {"mlp_parts": 2}},
        {"train": {"head_chunk_tokens": 7}},
        {"train": {"method": "lora"}},
        {"train": {"neftune_noise_alpha": 5.0}},
        {"memory": {"device": "emulated:1"}},
        {"data": {"seq_len": 32}},
    ],
)
def test_settings_that_a_trial_depends_on_have_trials_of_their_own(
    sections: dict[str, Any], tmp_path: Path, passes: list[TrialPass]
):
    measured(tmp_path)
    count = len(passes)
    data = sections.pop("data", {})
    measured(tmp_path, sections, **data)
    assert len(passes) > count


def test_other_code_of_a_model_is_tried_anew(
    tmp_path: Path, passes: list[TrialPass], monkeypatch: pytest.MonkeyPatch
):
    measured(tmp_path)
    count, of_class = len(passes), LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: of_class(self, x).clone())
    for times in (2, 3):  # what such code calls may have changed since
        measured(tmp_path)
        assert len(passes) == times * count


class Scaled(torch.nn.Linear):
    """A class of a program's own."""


def own_function(*inputs: Any, **options: Any) -> Any:
    """Stand for a hook, attention, or what a forward calls."""
    return inputs[0]


@pytest.mark.filterwarnings("ignore")
def test_code_that_no_version_tells_is_seen_wherever_it_stands(monkeypatch: pytest.MonkeyPatch):
    def model() -> Any:
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
            )
        )

    with torch.device("meta"):
        assert not has_unversioned_code(model())
        assert not has_unversioned_code(get_peft_model(model(), LoraConfig(target_modules=["q_proj"])))
        one = model()
        one.model.layers[0].mlp.up_proj = Scaled(8, 8)
        hooked, called_back, bound = model(), model(), model()
        plain = model()
    hooked.model.layers[0].register_forward_hook(own_function)
    called_back.model.norm.register_full_backward_pre_hook(partial(own_function))
    bound.model.norm.act = own_function
    assert all(map(has_unversioned_code, (one, hooked, called_back, bound)))
    handle = torch.nn.modules.module.register_module_forward_hook(own_function)
    assert has_unversioned_code(plain)
    handle.remove()
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "own", own_function)
        assert has_unversioned_code(plain)
    for place, name in (
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama.LlamaAttention, "helper"),
        (modeling_llama, "repeat_kv"),
    ):
        with monkeypatch.context() as patch:
            function = (
                wraps(modeling_llama.repeat_kv)(lambda *inputs: inputs)
                if name == "repeat_kv"
                else own_function
            )
            patch.setattr(place, name, function, raising=False)
            assert has_unversioned_code(plain)
    assert not has_unversioned_code(plain)


@pytest.mark.parametrize("damage", ["cut", "garbage", "other", "units"])
def test_damaged_notes_of_a_trial_are_none(damage: str, tmp_path: Path, passes: list[TrialPass]):
    first = measured(tmp_path)
    count = len(passes)
    entries = sorted((user_cache.cache_directory() / "trials").iterdir())
    assert entries
    for path in entries:
        content = path.read_bytes()
        if damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "garbage":
            path.write_bytes(b"garbage")
        else:  # whole, but of another form, or of another model
            text = b"[]" if damage == "other" else content.partition(b"\n")[2]
            if damage == "units":
                rows = json.loads(text)
                for row in rows:
                    row["kept"] = row["kept"][:1]
                text = json.dumps(rows).encode()
            user_cache.store("trials", path.stem, text)
    assert measured(tmp_path) == first
    assert len(passes) == 2 * count
