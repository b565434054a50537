import pytest

from contracts import CodecContract
from outsize.codecs.codec import RawCodec, open_codec
from outsize.codecs.codec_spec import RAW, SPECS, CodecSpec, codec_spec


class TestRaw(CodecContract):
    def make(self):
        return RawCodec(RAW)


def test_every_codec_that_has_facts_can_be_opened():
    assert {open_codec(name).spec.name for name in SPECS} == SPECS.keys()


def test_an_unknown_codec_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown codec 'zip'; there is raw"):
        codec_spec("zip")


def test_facts_that_contradict_each_other_are_refused():
    facts = {name: getattr(RAW, name) for name in CodecSpec.__dataclass_fields__}
    with pytest.raises(ValueError, match="lossless and has an error"):
        CodecSpec(**facts | {"error": 0.1})
    with pytest.raises(ValueError, match="needs dtypes"):
        CodecSpec(**facts | {"dtypes": ("int3",)})
