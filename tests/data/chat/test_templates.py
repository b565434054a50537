"""A table of chat templates and of shapes of conversations: what is trained is what the assistant says.

The oracle is a template's own marks: those of TRL's templates for training, and of the families written here. A
template without its marks must give what the marks give; one that has none must keep the rule, or refuse.
"""

import ast
import importlib.util
import logging
import re
from collections import Counter
from importlib.metadata import version
from itertools import takewhile
from pathlib import Path

import pytest
from jinja2 import TemplateError, UndefinedError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from data.chat.families import MARKED, without_marks
from data.chat.shapes import SHAPES, Message
from data.chat.unusual import MORE, UNUSUAL
from outsize.data.chat import ChatTemplate
from outsize.data.chat.reply_spans import Span
from outsize.data.encode import Encoder
from outsize.data.reading.formats import Document
from outsize.errors import DataError

# What a reply says, and nobody else: see `shapes`.
WORD, OTHERS = re.compile(r"A(?:ONE|TWO|THREE|ARG\d|WHY\d)"), re.compile(r"Q(?:ONE|TWO|THREE|SYS|RES\d|TOOL)")
# TRL marks headers of some families as trained, and the end of a tool's result; no header is the assistant's.
HEADERS = re.compile(r"^(?:<｜tool▁outputs▁end｜>)?(?:<｜Assistant｜>|<\|start\|>assistant|\n)?")
DOCS = Path(__file__).parents[3] / "docs" / "testing.md"


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def trls() -> dict[str, str]:
    """Return the templates that TRL ships."""
    files = sorted((_package("trl") / "chat_templates").glob("*.jinja"))
    return {f"trl {file.stem}": file.read_text(encoding="utf-8") for file in files}


def transformers_own() -> dict[str, str]:
    """Return the templates in the code of transformers."""
    found = {}
    for file in sorted(_package("transformers").glob("models/*/processing_*.py")):
        text = file.read_text(encoding="utf-8")
        if "{%" in text:
            strings = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            templates = [
                each for each in strings if isinstance(each, str) and "messages" in each and "{% for" in each
            ]
            found.update({f"transformers {file.stem} {n}": each for n, each in enumerate(templates)})
    return found


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    vocabulary = ["<eos>", "<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>")


def turns_of(messages: list[Message]) -> tuple[int, ...]:
    return tuple(n for n, message in enumerate(messages) if message["role"] == "assistant")


def render(
    tokenizer: PreTrainedTokenizerFast, template: str, shape: str, turns: tuple[int, ...] | None = None
) -> tuple[str, list[Span]]:
    """Return a conversation and what is trained of it: all replies, or some."""
    tokenizer.chat_template = template
    messages, tools = {**SHAPES, **MORE}[shape]
    return ChatTemplate(tokenizer).render(messages, turns or turns_of(messages), tools, "f:1")


def spans_by(tokenizer: PreTrainedTokenizerFast, template: str, shape: str) -> tuple[str, list[Span]] | None:
    """Return a conversation and what is trained of it; None where it is refused."""
    try:
        return render(tokenizer, template, shape)
    except DataError:
        return None


def joined(spans: list[Span]) -> list[Span]:
    """Return spans without the empty ones, those that touch as one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def plain(text: str, spans: list[Span]) -> str:
    """Return what is trained, without headers, and white space at its ends."""
    return "|".join(part for start, end in spans if (part := HEADERS.sub("", text[start:end]).strip()))


def assert_keeps_the_rule(text: str, spans: list[Span], name: str) -> None:
    trained = "|".join(text[start:end] for start, end in spans)
    assert WORD.findall(trained) == WORD.findall(text), name
    assert not OTHERS.search(trained), name


def outcome(text: str, spans: list[Span], marked: tuple[str, list[Span]] | None) -> str:
    if marked is None or marked[0] != text:
        return "by the rule"
    if joined(spans) == joined(marked[1]):
        return "equal"
    assert plain(text, spans) == plain(*marked), (text, [text[a:b] for a, b in spans])
    return "equal but for a header or white space"


def count(
    tokenizer: PreTrainedTokenizerFast, templates: dict[str, str], marks: dict[str, str]
) -> Counter[str]:
    """Render every shape by every template, and count what comes of it.

    Args:
        tokenizer: any.
        templates: none has marks.
        marks: the same with marks, of those that have them.
    """
    found: Counter[str] = Counter()
    for name, template in templates.items():
        for shape in SHAPES:
            case = f"{name}: {shape}"
            read = spans_by(tokenizer, template, shape)
            if read is None:
                found["refused"] += 1
                continue
            assert_keeps_the_rule(*read, case)
            marked = spans_by(tokenizer, marks[name], shape) if name in marks else None
            found[outcome(*read, marked)] += 1
    return found


def sentence(kind: str, num_templates: int, found: Counter[str]) -> str:
    """Return what docs/testing.md says of a part of the table."""
    cells = num_templates * len(SHAPES)
    assert found.total() == cells
    return (
        f"{kind}: {num_templates} templates × {len(SHAPES)} shapes = {cells:,}: {found['equal']:,} equal to the marks, "
        f"{found['equal but for a header or white space']:,} equal but for a header or white space, "
        f"{found['by the rule']:,} by the rule, {found['refused']:,} refused"
    )


def test_every_template_that_libraries_ship_trains_what_the_assistant_says(tokenizer, caplog):
    caplog.set_level(logging.ERROR)
    marked = {name: text for name, text in trls().items() if name.endswith("_training")}
    unmarked = {name: without_marks(text) for name, text in {**trls(), **transformers_own()}.items()}
    marks = {**{name.removesuffix("_training"): text for name, text in marked.items()}, **marked}
    # It ends a reply with what opens the next message; its training template calls that the end.
    del marks["trl glm4moe"]
    said = sentence("Shipped", len(unmarked), count(tokenizer, unmarked, marks))
    if version("trl").startswith("1.16."):
        assert said in " ".join(DOCS.read_text(encoding="utf-8").split()), said


def test_templates_like_those_of_other_families_train_what_the_assistant_says(tokenizer, caplog):
    caplog.set_level(logging.ERROR)
    unmarked = {name: without_marks(text) for name, text in MARKED.items()}
    said = sentence("Written here", len(MARKED), count(tokenizer, unmarked, MARKED))
    assert said in " ".join(DOCS.read_text(encoding="utf-8").split()), said


def test_unusual_templates_train_all_of_a_reply_and_no_header_of_others_or_refuse(tokenizer, caplog):
    caplog.set_level(logging.ERROR)
    found: Counter[str] = Counter()
    for name, template in UNUSUAL.items():
        for shape in {**SHAPES, **MORE}:
            case = f"{name}: {shape}"
            read, marked = (spans_by(tokenizer, each, shape) for each in (without_marks(template), template))
            if read is None or marked is None or marked[0] != read[0]:
                found["refused" if read is None else "by the rule"] += 1
                continue
            text, spans = read[0].upper(), joined(read[1])
            assert_keeps_the_rule(text, spans, case)
            trained = "|".join(text[start:end] for start, end in spans)
            assert not re.search("<(USER|SYSTEM|TOOL|DEVELOPER)", trained), case
            for start, end in joined(marked[1]):
                assert any(one <= start and end <= other for one, other in spans), (case, trained)
            found["equal" if joined(spans) == joined(marked[1]) else "more"] += 1
    num_shapes = len(SHAPES) + len(MORE)
    num = len(UNUSUAL) * num_shapes
    said = (
        f"Unusual: {len(UNUSUAL)} templates × {num_shapes} shapes = {num:,}: {found['equal']:,} equal to the "
        f"marks, {found['more']:,} with the reply's own header or what the template writes at the end of all, "
        f"{found['by the rule']:,} by the rule, {found['refused']:,} refused"
    )
    assert found.total() == num
    assert said in " ".join(DOCS.read_text(encoding="utf-8").split()), said


def test_calls_are_trained_as_they_are_marked_whether_a_result_follows_or_none(tokenizer, caplog):
    """What opens a result may stand behind a call that has none; it is the tool's."""
    caplog.set_level(logging.ERROR)
    num = 0
    for name, template in trls().items():
        for shape in (each for each in MORE if "call" in each and name.endswith("_training")):
            read, marked = (spans_by(tokenizer, each, shape) for each in (without_marks(template), template))
            if read is not None and marked is not None and marked[0] == read[0]:
                assert plain(read[0], joined(read[1])) == plain(marked[0], joined(marked[1])), (name, shape)
                num += 1
    assert num > 70


@pytest.mark.parametrize(
    "shape", ["three answers", "assistant twice", "calls in two rounds", "think tags twice"]
)
def test_some_replies_are_trained_as_they_are_among_all(tokenizer, shape, caplog):
    caplog.set_level(logging.ERROR)
    turns = turns_of(SHAPES[shape][0])
    num = 0
    for name, template in {**trls(), **MARKED, **{n: without_marks(t) for n, t in MARKED.items()}}.items():
        if (whole := spans_by(tokenizer, template, shape)) is None:
            continue
        parts = [render(tokenizer, template, shape, (turn,))[1] for turn in turns]
        assert sorted(span for part in parts for span in part) == sorted(whole[1]), name
        assert [len(WORD.findall(plain(whole[0], part))) > 0 for part in parts] == [True] * len(turns), name
        num += 1
    assert num > 40


def test_marks_give_the_tokens_that_transformers_gives(tokenizer, caplog):
    caplog.set_level(logging.ERROR)
    num = 0
    marked = {name: text for name, text in trls().items() if name.endswith("_training")}
    for template in {**marked, **MARKED}.values():
        for shape in ("three answers", "calls in two rounds", "reasoning", "white space at the borders"):
            if spans_by(tokenizer, template, shape) is None:
                continue
            messages, tools = SHAPES[shape]
            try:
                theirs = tokenizer.apply_chat_template(
                    messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
                )
            except (
                TypeError,
                UndefinedError,
            ):  # it needs another form of the messages, which is ours to find
                continue
            document = Document("f:1", messages=messages, turns=turns_of(messages), tools=tools)
            (ours,) = Encoder(tokenizer, eos=False, masked=True).encode([document])
            if ours.ids.tolist() == theirs["input_ids"]:
                assert ours.trained is not None
                assert ours.trained.tolist() == theirs["assistant_masks"]
                num += 1
    assert num > 120


def metaspace() -> Tokenizer:
    """As SentencePiece: a space is a letter, and one is put in front."""
    letters = [("<unk>", 0.0), ("▁", -1.0), *((chr(code), -2.0) for code in range(33, 127))]
    backend = Tokenizer(models.Unigram(letters, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def words() -> Tokenizer:
    """White space is dropped."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


def trimmed() -> Tokenizer:
    """Bytes, of whose places white space is trimmed off."""
    backend = Tokenizer(
        models.BPE(vocab={t: n for n, t in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


@pytest.mark.parametrize("kind", [metaspace, words, trimmed])
def test_tokens_of_every_kind_of_tokenizer_keep_the_rule(kind, caplog):
    caplog.set_level(logging.ERROR)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=kind(), eos_token="<eos>", bos_token="<bos>")
    num = 0
    for name in ("chatml", "mistral v3", "vicuna", "llama 2", "gemma"):
        for template in (MARKED[name], without_marks(MARKED[name])):
            for shape, (messages, tools) in SHAPES.items():
                if (read := spans_by(tokenizer, template, shape)) is None:
                    continue
                document = Document("f:1", messages=messages, turns=turns_of(messages), tools=tools)
                (encoded,) = Encoder(tokenizer, eos=False, masked=True).encode([document])
                assert encoded.trained is not None
                places = tokenizer(read[0], add_special_tokens=False, return_offsets_mapping=True)[
                    "offset_mapping"
                ]
                for pattern, wanted in ((WORD, 1), (OTHERS, 0)):
                    for word in pattern.finditer(read[0]):
                        over = [n for n, (a, b) in enumerate(places) if a < word.end() and b > word.start()]
                        assert over, shape
                        assert {int(encoded.trained[n]) for n in over} == {wanted}, (name, shape, word)
                num += 1
    assert num > 150


def test_completions_begin_where_trl_begins_them(tokenizer, caplog):
    """TRL trains from where the prompt, opened for a reply, and the conversation part; marks count only behind that."""
    caplog.set_level(logging.ERROR)
    num: Counter[str] = Counter()
    plain_ones = {name: without_marks(text) for name, text in MARKED.items()}
    for name, template in {**trls(), **MARKED, **{f"{n}, bare": t for n, t in plain_ones.items()}}.items():
        tokenizer.chat_template = template
        for shape, (messages, tools) in SHAPES.items():
            if messages[-1]["role"] != "assistant" or spans_by(tokenizer, template, shape) is None:
                continue
            last = len(messages) - 1
            try:
                form = ChatTemplate(tokenizer).form(messages, tools, "f:1", {})
                asked = tokenizer.apply_chat_template(
                    form[:last], tools=tools, add_generation_prompt=True, return_dict=True
                )["input_ids"]
                theirs = tokenizer.apply_chat_template(form, tools=tools, return_dict=True)["input_ids"]
            except (DataError, TemplateError, TypeError):
                continue
            border = sum(
                1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(asked, theirs, strict=False))
            )
            record = Document("f:1", messages=messages, turns=(last,), tools=tools, num_asked=last)
            (ours,) = Encoder(tokenizer, eos=False, masked=True).encode([record])
            assert ours.trained is not None
            trained = ours.trained.tolist()[: len(theirs)]
            assert ours.ids.tolist()[: len(theirs)] == theirs
            assert not any(trained[:border]), (name, shape)
            num["equal" if all(trained[border:]) else "less"] += 1
    assert num["equal"] > num["less"], num
    assert num.total() > 500, num
