import pytest
import torch
from safetensors.torch import save_file

from outsize.cli.text.probe_text import several_rows
from outsize.errors import CodecError
from outsize.hardware.machine_file import parse
from outsize.probing.data_probe import measure_codecs
from outsize.probing.run_probe import Wishes, probe
from probe.efforts import TINY


def test_codecs_are_tried_on_tensors_of_yours(tmp_path):
    path = tmp_path / "some.safetensors"
    save_file({"layer.weight": torch.randn(4096).bfloat16()}, path)
    found = probe(TINY, [], wishes=Wishes(tensors=path))
    figures = {rates.codec: rates for rates in found.codecs}
    assert figures["int8"].ratio.value < 0.6
    assert figures["int8"].relative_error.value > 0
    assert figures["lossless4"].largest_error.value == 0
    assert str(path) in figures["int8"].encode_bytes_per_s.source
    assert any(name.startswith("lossless4 on weights") for name, *_ in several_rows(found))
    assert parse(found.to_json()) == found


def test_a_file_that_is_none_is_told(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no")
    with pytest.raises(CodecError, match="not a safetensors file"):
        measure_codecs(tmp_path / "broken.safetensors")
    assert measure_codecs(None) == ()
