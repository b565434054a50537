import json
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import zoo
from outsize.checkpoint.files import checkpoint_map
from outsize.checkpoint.files.checkpoint_reader import CheckpointReader, WeightSource
from outsize.errors import CheckpointError
from outsize.model.build import build_skeleton, load_hf_config

STRETCH = 1000  # elements per read: ends inside rows, experts and projections


def save(model: nn.Module, directory: Path, max_shard_size: str = "60KB") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(directory, max_shard_size=max_shard_size)


def read_all(source: WeightSource, name: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    flat = torch.full((like.numel(),), torch.nan, dtype=dtype)
    for start in range(0, like.numel(), STRETCH):
        stop = min(start + STRETCH, like.numel())
        source.read(name, start, stop, flat[start:stop])
    return flat.view(like.shape)


def edit(path: Path, change) -> None:
    """Rewrite a safetensors file with what ``change`` makes of its tensors."""
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(zoo.build("llama"), tmp_path, "1GB")
    return tmp_path


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_every_parameter_and_stored_buffer_comes_back_bit_for_bit(name: str, tmp_path: Path):
    model = zoo.build(name)
    save(model, tmp_path)
    skeleton = build_skeleton(load_hf_config(tmp_path))
    reader = CheckpointReader(tmp_path, skeleton)
    assert reader.unexpected == ()
    for parameter_name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(read_all(reader, parameter_name, parameter), parameter), parameter_name
    reader.load_buffers(skeleton)
    buffers = dict(skeleton.named_buffers())
    for buffer_name, buffer in model.named_buffers():
        assert torch.equal(buffers[buffer_name], buffer), buffer_name


@pytest.mark.parametrize("name", ["llama", "mixtral", "olmo_hybrid"])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_values_are_cast_to_the_dtype_of_their_place(name: str, stored: torch.dtype, tmp_path: Path):
    model = zoo.build(name, dtype=stored)
    save(model, tmp_path)
    reader = CheckpointReader(tmp_path, build_skeleton(load_hf_config(tmp_path), "bf16"))
    for parameter_name, parameter in model.named_parameters():
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(read_all(reader, parameter_name, parameter, dtype), parameter.to(dtype))


def test_a_checkpoint_of_the_base_model_lacks_a_prefix_and_is_read(tmp_path: Path):
    model = zoo.build("llama_tied")
    save(model.model, tmp_path)
    reader = CheckpointReader(tmp_path, build_skeleton(zoo.make_config("llama_tied")))
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(read_all(reader, parameter_name, parameter), parameter)


def test_experts_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = zoo.build("mixtral")
    save(model, tmp_path)
    reader = CheckpointReader(tmp_path, build_skeleton(zoo.make_config("mixtral")))
    loaded: list[str] = []
    read_tensor = checkpoint_map.read_tensor

    def spy(stored):
        loaded.append(stored.name.split("experts.")[1])
        return read_tensor(stored)

    monkeypatch.setattr(checkpoint_map, "read_tensor", spy)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    fused = model.get_parameter(name)
    row = fused[0].numel()
    into = torch.empty(row // 2)
    reader.read(name, 2 * row, 2 * row + row // 2, into)
    reader.read(name, 2 * row + row // 2, 3 * row, into)
    assert torch.equal(into, fused[2].reshape(-1)[row // 2 :])
    assert loaded == ["2.w1.weight", "2.w3.weight"]  # for both reads together
    reader.read(name, 3 * row, 4 * row, torch.empty(row))
    assert loaded[2:] == ["3.w1.weight", "3.w3.weight"]


def test_what_the_model_does_not_use_is_named(saved: Path, caplog: pytest.LogCaptureFixture):
    edit(saved / "model.safetensors", lambda t: t.update(extra=torch.zeros(2)))
    with caplog.at_level("WARNING", logger="outsize"):
        reader = CheckpointReader(saved, build_skeleton(zoo.make_config("llama")))
    assert reader.unexpected == ("extra",)
    assert "not used: extra" in caplog.text


def test_a_stored_buffer_that_is_missing_keeps_its_initial_value(tmp_path: Path, caplog):
    save(zoo.build("deepseek_v3"), tmp_path, "1GB")
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    edit(tmp_path / "model.safetensors", lambda t: t.pop(key))
    skeleton = build_skeleton(load_hf_config(tmp_path))
    with caplog.at_level("WARNING", logger="outsize"):
        CheckpointReader(tmp_path, skeleton).load_buffers(skeleton)
    assert f"{key} is not stored" in caplog.text
    assert not skeleton.get_buffer(key).any()


def test_missing_tensors_are_named(saved: Path):
    lost = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    edit(saved / "model.safetensors", lambda t: [t.pop(name) for name in lost])
    with pytest.raises(
        CheckpointError, match=r"lacks 2 tensors .*layers\.1\.mlp\.up_proj\.weight, model\.norm"
    ):
        CheckpointReader(saved, build_skeleton(zoo.make_config("llama")))


def test_another_shape_is_an_error_that_names_file_tensor_and_both_shapes(saved: Path):
    config = zoo.make_config("llama")
    config.intermediate_size = 56
    with pytest.raises(CheckpointError) as error:
        CheckpointReader(saved, build_skeleton(config))
    for part in ("model.safetensors", "mlp.down_proj.weight", "(32, 48)", "(32, 56)", "config.json"):
        assert part in str(error.value)


def test_a_missing_expert_is_an_error(tmp_path: Path):
    save(zoo.build("mixtral"), tmp_path, "1GB")
    lost = [f"model.layers.0.block_sparse_moe.experts.3.{w}.weight" for w in ("w1", "w2", "w3")]
    edit(tmp_path / "model.safetensors", lambda t: [t.pop(name) for name in lost])
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.w1\.weight and 5 more: shape \(3, .*has shape \(4, "
    ):
        CheckpointReader(tmp_path, build_skeleton(zoo.make_config("mixtral")))


def test_half_an_expert_is_an_error(tmp_path: Path):
    save(zoo.build("mixtral"), tmp_path, "1GB")
    lost = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    edit(tmp_path / "model.safetensors", lambda t: t.pop(lost))
    with pytest.raises(CheckpointError, match=r"7 tensors such as .* cannot be made into .*gate_up_proj"):
        CheckpointReader(tmp_path, build_skeleton(zoo.make_config("mixtral")))


def test_tied_weights_stored_twice_and_equal_are_fine(tmp_path: Path):
    model = zoo.build("llama_tied")
    save(model, tmp_path, "1GB")
    copy = model.lm_head.weight.detach().clone()
    edit(tmp_path / "model.safetensors", lambda t: t.update({"lm_head.weight": copy}))
    reader = CheckpointReader(tmp_path, build_skeleton(zoo.make_config("llama_tied")))
    assert torch.equal(read_all(reader, "lm_head.weight", copy), copy)


def test_tied_weights_stored_under_the_other_name_are_found(tmp_path: Path):
    model = zoo.build("llama_tied")
    save(model, tmp_path, "1GB")
    edit(
        tmp_path / "model.safetensors",
        lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}),
    )
    reader = CheckpointReader(tmp_path, build_skeleton(zoo.make_config("llama_tied")))
    weight = model.lm_head.weight
    assert torch.equal(read_all(reader, "model.embed_tokens.weight", weight), weight)


def test_tied_weights_that_differ_are_an_error(tmp_path: Path):
    save(zoo.build("llama_tied"), tmp_path, "1GB")
    edit(tmp_path / "model.safetensors", lambda t: t.update({"lm_head.weight": torch.ones(97, 32)}))
    with pytest.raises(CheckpointError, match=r"differ, but config.json ties them"):
        CheckpointReader(tmp_path, build_skeleton(zoo.make_config("llama_tied")))


def test_quantised_weights_are_refused(saved: Path):
    key = "model.layers.0.mlp.up_proj.weight"
    edit(saved / "model.safetensors", lambda t: t.update({key: t[key].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=r"stored as torch.float8_e4m3fn, which cannot be trained"):
        CheckpointReader(saved, build_skeleton(zoo.make_config("llama")))


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path):
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights .pytorch_model.bin., which run code"):
        CheckpointReader(tmp_path, build_skeleton(zoo.make_config("llama")))


def test_a_directory_without_weights_is_an_error(tmp_path: Path):
    with pytest.raises(CheckpointError, match="holds neither"):
        CheckpointReader(tmp_path, build_skeleton(zoo.make_config("llama")))
    with pytest.raises(CheckpointError, match="is not a directory"):
        CheckpointReader(tmp_path / "nowhere", build_skeleton(zoo.make_config("llama")))


class TestShards:
    """What can be wrong with an index and the files it names."""

    @pytest.fixture
    def sharded(self, tmp_path: Path) -> Path:
        save(zoo.build("llama"), tmp_path)
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        return tmp_path

    def open(self, directory: Path) -> CheckpointReader:
        return CheckpointReader(directory, build_skeleton(zoo.make_config("llama")))

    def change_index(self, directory: Path, change) -> None:
        path = directory / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))

    def test_a_missing_shard_is_an_error(self, sharded: Path):
        next(iter(sorted(sharded.glob("*.safetensors")))).unlink()
        with pytest.raises(CheckpointError, match=r"model-00001-of-0000\d\.safetensors is missing"):
            self.open(sharded)

    def test_a_truncated_shard_is_an_error(self, sharded: Path):
        path = max(sharded.glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-4])
        with pytest.raises(CheckpointError, match=f"{path.name} is truncated"):
            self.open(sharded)

    def test_a_tensor_in_another_shard_than_the_index_says_is_an_error(self, sharded: Path):
        names = sorted(p.name for p in sharded.glob("*.safetensors"))

        def swap(weight_map: dict[str, str]) -> None:
            key = "model.norm.weight"
            weight_map[key] = names[0] if weight_map[key] != names[0] else names[1]

        self.change_index(sharded, swap)
        with pytest.raises(CheckpointError, match=r"does not hold model\.norm\.weight, as the index says"):
            self.open(sharded)

    def test_an_index_may_not_lead_elsewhere(self, sharded: Path):
        for named in ("../../etc/passwd", "a\0b", 7, ""):
            self.change_index(sharded, lambda weight_map, named=named: weight_map.update(x=named))
            with pytest.raises(CheckpointError, match="is no file beside it"):
                self.open(sharded)

    def test_an_index_that_is_none_is_an_error(self, sharded: Path):
        (sharded / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(CheckpointError, match="is not an index"):
            self.open(sharded)
