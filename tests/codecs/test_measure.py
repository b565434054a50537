import pytest
import torch
from safetensors.torch import save_file

from contracts.device_contract import normal
from outsize.codecs.codec import NAMES, core_seconds, exponent_bound, kind_of, measure, measure_file
from outsize.errors import CodecError


def test_every_codec_is_measured_on_every_kind(tmp_path):
    tensors = {"layer.weight": normal(4096, torch.float32), "layer.exp_avg": normal(2048, torch.float32)}
    save_file({**tensors, "ids": torch.arange(5)}, tmp_path / "some.safetensors")
    found = measure_file(tmp_path / "some.safetensors")
    assert {(figures.kind, figures.numel) for figures in found} == {("weights", 4096), ("moments", 2048)}
    assert {figures.codec for figures in found} == {*NAMES, "zstd-3"}
    cast = measure_file(tmp_path / "some.safetensors", torch.bfloat16, ["int4"])
    assert [(figures.dtype, figures.codec) for figures in cast] == [("bf16", "int4")] * 2


def test_no_more_is_held_of_a_file_than_is_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr("outsize.codecs.codec.MOST_ELEMENTS", 1000)
    save_file({f"{i}.weight": normal(600, torch.float32) for i in range(4)}, tmp_path / "some.safetensors")
    kept = []
    cat = torch.cat
    monkeypatch.setattr(
        torch, "cat", lambda parts: kept.append([p.untyped_storage().nbytes() for p in parts]) or cat(parts)
    )
    (figures,) = measure_file(tmp_path / "some.safetensors", names=["int8"])
    assert figures.numel == 1000
    assert kept[0] == [2400, 1600]


def test_lossless_ones_have_no_error_and_no_ratio_below_the_bound():
    for figures in measure("weights", normal(2**17, torch.bfloat16)):
        lossless = figures.codec in ("lossless4", "lossless3", "zstd-3")
        assert (figures.largest_error == 0) == (figures.relative_error == 0) == lossless
        assert not lossless or figures.bound <= figures.ratio < 0.8
        assert figures.encode_bytes_per_s > 0
        assert figures.to_dict()["codec"] == figures.codec


def test_what_is_not_finite_is_left_out_of_errors():
    source = normal(4096, torch.float32)
    source[7] = torch.nan
    (figures,) = measure("gradients", source, ["int8"])
    assert 0 < figures.largest_error < 1


def test_kinds_follow_names():
    names = ["model.layers.0.q_proj.weight", "q_proj.exp_avg_sq", "q_proj.grad", "hidden_states.3"]
    assert [kind_of(name) for name in names] == ["weights", "moments", "gradients", "activations"]


def test_files_that_hold_nothing_of_the_kind_are_refused(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"nothing")
    save_file({"ids": torch.arange(5)}, tmp_path / "ids.safetensors")
    for name, message in (("bad", "not a safetensors file"), ("ids", "no tensor of fp32")):
        with pytest.raises(CodecError, match=message):
            measure_file(tmp_path / f"{name}.safetensors")


def test_the_time_of_work_is_above_zero_and_threads_are_as_before():
    before = torch.get_num_threads()
    assert core_seconds(lambda: None, 1) > 0
    assert torch.get_num_threads() == before


def test_the_bound_is_the_entropy_of_exponents_and_all_other_bits():
    """Four exponents, equally frequent, are two bits."""
    source = torch.tensor([1.0, 2.0, -4.5, 8.0]).repeat(10)
    assert exponent_bound(source.bfloat16()) == (1 + 7 + 2) / 16
    assert exponent_bound(source) == (1 + 23 + 2) / 32
    assert exponent_bound(source.half()) == (1 + 10 + 2) / 16
