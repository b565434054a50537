"""Layouts of records of public data sets: trained as TRL trains them, more of them read, or refused by name."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.data.encode import Encoder
from outsize.data.reading.corpus_files import Corpus, find_sources
from outsize.data.reading.documents import DocumentReader
from outsize.errors import DataError
from zoo import make_config

datasets: Any = pytest.importorskip("datasets")
trl: Any = pytest.importorskip("trl")

Record = dict[str, Any]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"name": "look", "arguments": {"city": "Paris"}}


def user(text: Any, /, **more: Any) -> Record:
    return {"role": "user", "content": text, **more}


def said(text: Any, /, **more: Any) -> Record:
    return {"role": "assistant", "content": text, **more}


def human(text: str, /, **more: Any) -> Record:
    return {"from": "human", "value": text, **more}


def gpt(text: str, /, **more: Any) -> Record:
    return {"from": "gpt", "value": text, **more}


def called(arguments: Any, content: Any = None) -> list[Record]:
    function = {"name": "look", "arguments": arguments}
    calls = [{"id": "c1", "type": "function", "function": function}]
    return [
        user("q"),
        said(content, tool_calls=calls),
        {"role": "tool", "tool_call_id": "c1", "content": "22"},
        said("warm"),
    ]


CHAT = [user("q"), said("a")]
SYSTEM = {"role": "system", "content": "s"}
SPOKEN = [human("q"), gpt("a")]

# What TRL trains of a record, token for token. Beside it, what is told of fields that neither reads.
SAME: dict[str, tuple[Record, str]] = {
    "openai": ({"messages": [SYSTEM, *CHAT]}, ""),
    "openai, several turns": ({"messages": [*CHAT, user("r"), said("b")]}, ""),
    "calls with objects": ({"messages": called({"city": "Paris"}), "tools": [SCHEMA]}, ""),
    "calls with text": ({"messages": called({"city": "Paris"}, "wait"), "tools": [SCHEMA]}, ""),
    "tools as JSON text": ({"messages": CHAT, "tools": json.dumps([SCHEMA])}, ""),
    "tools without a type": ({"messages": CHAT, "tools": [SCHEMA["function"]]}, ""),
    "sharegpt": ({"id": "identity_0", "conversations": SPOKEN}, ""),
    "sharegpt with a system turn": ({"conversations": [{"from": "system", "value": "s"}, *SPOKEN]}, ""),
    "sharegpt begun by the model": ({"conversations": [gpt("hello"), *SPOKEN]}, ""),
    "sharegpt with nulls": ({"conversations": [human("q", text=None), gpt("a", text=None)]}, ""),
    "slimorca": ({"conversations": [human("q", weight=0.0), gpt("a", weight=1.0)]}, ""),
    "hermes": (
        {
            "conversations": [
                human("q"),
                gpt("<tool_call>{}</tool_call>"),
                {"from": "tool", "value": "22"},
                gpt("ok"),
            ],
            "tools": "[]",
            "subcategory": "s",
        },
        "subcategory",
    ),
    "numina": ({"problem": "p", "solution": "x", "messages": CHAT}, "problem (1 records), solution"),
    "reasoning that the template leaves out": (
        {"messages": [user("q"), said("a", reasoning_content="t")]},
        "",
    ),
    "smoltalk 2": ({"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}, ""),
    "names": ({"messages": [user("q", name="Bob"), said("a", name="Al")]}, ""),
    "an empty reply": ({"messages": [user("q"), said("")]}, ""),
    "two replies": ({"messages": [*CHAT, said("b")]}, ""),
    "ends with a question": ({"messages": [*CHAT, user("bye")]}, ""),
    "two system prompts": ({"messages": [SYSTEM, SYSTEM, *CHAT]}, ""),
    "a rejected reply beside": ({"messages": CHAT, "rejected_response": "b"}, "rejected_response"),
    "a mask of messages": ({"messages": CHAT, "mask": [0, 1]}, "mask"),
    "kto of LLaMA-Factory": ({"conversations": SPOKEN, "kto_tag": False}, "kto_tag"),
    "a system message": ({"system_message": "s", "messages": CHAT}, "system_message"),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, ""),
    "kto": ({"prompt": "q", "completion": "a", "label": False}, "label"),
    "text": ({"text": "hello", "meta": {"set": "x"}}, ""),
    "text and label": ({"text": "hello", "label": 1}, "label"),
    "oasst": ({"text": "q", "role": "prompter", "parent_id": None, "lang": "en"}, "role"),
    "guanaco": ({"text": "### Human: q### Assistant: a"}, ""),
}
# What TRL does not read, or reads less of: what is trained, and what is told.
MORE: dict[str, tuple[Record, str, str]] = {
    "weights": (
        {"messages": [user("q"), said("bad", weight=0), user("r"), said("b")]},
        "\nb<|im_end|>\n",
        "",
    ),
    "loss of ms-swift": (
        {"messages": [user("q"), said("bad", loss=False), said("b")]},
        "\nb<|im_end|>\n",
        "",
    ),
    "calls with text of JSON": (
        {"messages": called(json.dumps(CALL["arguments"])), "parallel_tool_calls": False},
        f"\n<tool_call>\n{json.dumps(CALL)}\n</tool_call><|im_end|>\n\nwarm<|im_end|>\n",
        "parallel_tool_calls",
    ),
    "calls of LLaMA-Factory": (
        {
            "conversations": [
                human("q"),
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "22"},
                gpt("a"),
            ],
            "tools": json.dumps([SCHEMA]),
        },
        f"\n<tool_call>\n{json.dumps(CALL)}\n</tool_call><|im_end|>\n\na<|im_end|>\n",
        "",
    ),
    "functions": ({"messages": CHAT, "functions": [SCHEMA["function"]]}, "\na<|im_end|>\n", ""),
    "a system prompt beside": ({"system": "s", "conversations": SPOKEN}, "\na<|im_end|>\n", ""),
    "ultrachat": ({"prompt": "q", "prompt_id": "f", "messages": CHAT}, "\na<|im_end|>\n", "prompt"),
    "ultrafeedback": (
        {"messages": CHAT, "chosen": CHAT, "rejected": CHAT, "score_chosen": 8.0},
        "\na<|im_end|>\n",
        "chosen (1 records), rejected (1 records), score_chosen",
    ),
    "parts of text": (
        {"messages": [user([{"type": "text", "text": "q"}]), said([{"type": "text", "text": "a"}])]},
        "\na<|im_end|>\n",
        "",
    ),
    "images that are none": ({"messages": CHAT, "images": []}, "\na<|im_end|>\n", ""),
    "images": ({"messages": [user("<image>q"), said("a")], "images": ["x.png"]}, "\na<|im_end|>\n", "images"),
    "roles in capitals": (
        {"messages": [{"role": "User", "content": "q"}, {"role": "Assistant", "content": "a"}]},
        "\na<|im_end|>\n",
        "",
    ),
    "alpaca": ({"instruction": "i", "input": "x", "output": "o"}, "o<|im_end|>", ""),
    "alpaca without an input": ({"instruction": "i", "output": "o"}, "o<|im_end|>", ""),
    "alpaca with its text": ({"instruction": "i", "output": "o", "text": "i o"}, "o<|im_end|>", "text"),
    "alpaca with examples": (
        {"instruction": "i", "output": "o", "demonstrations": "d"},
        "o<|im_end|>",
        "demonstrations",
    ),
}
NO_FORMAT = "no known format has the fields"
REFUSED: dict[str, tuple[Record, str]] = {
    "turns under items": ({"items": SPOKEN}, NO_FORMAT),
    "conversation": ({"conversation": CHAT}, NO_FORMAT),
    "capybara": ({"source": "x", "conversation": [{"input": "q", "output": "a"}]}, NO_FORMAT),
    "dialog": ({"dialog": ["q", "a"], "act": [1, 2]}, NO_FORMAT),
    "ultrachat as it came": ({"id": "1", "data": ["q", "a"]}, NO_FORMAT),
    "pairs": ({"id": "1", "messages": [["q", "a"]]}, "must be a list of messages, at least one"),
    "xlam": ({"id": 1, "query": "q", "answers": "[]", "tools": "[]"}, NO_FORMAT),
    "glaive": ({"system": "s", "chat": "USER: q ASSISTANT: a"}, NO_FORMAT),
    "hh": ({"chosen": "Human: q Assistant: a", "rejected": "Human: q Assistant: b"}, NO_FORMAT),
    "dolly": (
        {"instruction": "i", "context": "c", "response": "o"},
        r"data.columns .*\{output: response, input: context\}",
    ),
    "openorca": ({"system_prompt": "s", "question": "q", "response": "r"}, "prompt: question, completion: "),
    "gsm8k": ({"question": "q", "answer": "a"}, "prompt: question, completion: answer"),
    "metamath": ({"query": "q", "response": "r"}, "prompt: query, completion: response"),
    "prompt and response": ({"prompt": "q", "response": "r"}, "completion: response"),
    "segments": ({"segments": [{"label": True, "text": "a"}]}, NO_FORMAT),
    "code": ({"content": "x = 1"}, NO_FORMAT),
    "tokens": ({"input_ids": [1, 2], "labels": [-100, 2]}, NO_FORMAT),
    "several outputs": ({"instruction": "i", "output": ["o", "p"]}, "field 'output' must be a string"),
    "several completions": ({"prompt": "q", "completions": ["a", "b"]}, NO_FORMAT),
    "summaries": ({"document": "d", "summary": "s"}, NO_FORMAT),
    "translations": ({"translation": {"en": "a", "de": "b"}}, NO_FORMAT),
    "squad": ({"context": "c", "question": "q", "answers": {"text": ["a"]}}, NO_FORMAT),
    "a picture": ({"messages": [user([{"type": "image"}]), said("a")]}, "a part of it is 'image'"),
    "a number": ({"messages": [user("q"), said(5)]}, "must be text, found int"),
    "nothing": ({"messages": None}, NO_FORMAT),
}


@pytest.fixture(scope="module")
def chats(tokenizer: Any) -> Any:
    """A tokenizer with a template of TRL's, with marks."""
    made = copy.deepcopy(tokenizer)
    made.eos_token, made.pad_token = "<|im_end|>", "<|endoftext|>"
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5_training.jinja").read_text()
    return made


Read = Callable[..., tuple[list[tuple[list[int], list[int]]], str]]


@pytest.fixture
def read(chats: Any, tmp_path: Path) -> Read:
    def read(record: Record, kind: str = "jsonl") -> tuple[list[tuple[list[int], list[int]]], str]:
        """Return tokens and labels of a record's documents, and what was told of it."""
        path = tmp_path / f"records.{kind}"
        if kind == "jsonl":
            path.write_text(json.dumps(record) + "\n")
        else:
            datasets.Dataset.from_list([record]).to_parquet(path)
        reader = DocumentReader(find_sources(path), None, Corpus(path=path))
        encoder = Encoder(chats, eos=True, masked=reader.detect() != "text")
        rows = []
        for document in encoder.encode(list(reader.documents())):
            ids = document.ids.tolist()
            trained = [True] * len(ids) if document.trained is None else document.trained.tolist()
            rows.append(
                (ids, [token if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)])
            )
        return rows, "; ".join(reader.notes())

    return read


@pytest.fixture(scope="module")
def trls(chats: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Record], Any]:
    from transformers import AutoModelForCausalLM

    config = make_config("llama")
    config.vocab_size = len(chats)
    model = AutoModelForCausalLM.from_config(config)

    def prepared(record: Record) -> list[tuple[list[int], list[int]]]:
        """Return tokens and labels as TRL's trainer prepares a record; turns of ShareGPT in OpenAI's names."""
        if turns := record.get("conversations"):
            names = {"human": "user", "gpt": "assistant"}
            messages = [
                {"role": names.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns
            ]
            record = {**{key: record[key] for key in record if key != "conversations"}, "messages": messages}
        arguments = trl.SFTConfig(
            str(tmp_path_factory.getbasetemp() / "trl"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_length=None,
            assistant_only_loss="messages" in record,
        )
        trainer = trl.SFTTrainer(
            model, arguments, train_dataset=datasets.Dataset.from_list([record]), processing_class=chats
        )
        return [(row["input_ids"], row.get("labels") or row["input_ids"]) for row in trainer.train_dataset]

    return prepared


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("record", "told"), SAME.values(), ids=SAME.keys())
def test_a_layout_that_trl_takes_has_its_tokens_and_labels(
    record: Record, told: str, read: Read, trls: Callable[[Record], Any]
):
    rows, notes = read(record)
    assert rows == trls(record)
    if record == SAME["an empty reply"][0]:
        assert "1 reply is empty" in notes
    else:
        assert notes == (f"in the records and not used: {told} (1 records)" if told else "")


@pytest.mark.parametrize(("record", "trained", "told"), MORE.values(), ids=MORE.keys())
def test_a_layout_that_trl_reads_less_of_trains_its_replies(
    record: Record, trained: str, told: str, read: Read, chats: Any
):
    rows, notes = read(record)
    assert [chats.decode([token for token in labels if token != -100]) for _, labels in rows] == [trained]
    assert notes == (f"in the records and not used: {told} (1 records)" if told else "")


def test_parquet_says_what_json_does(read: Read):
    """There every turn has the fields of all, null where it has none, and every record the fields of others."""
    for name, (record, *_) in {**SAME, **MORE}.items():
        rows, notes = read(record, "parquet")
        assert (rows, notes.replace(".parquet", ".jsonl")) == read(record), name


@pytest.mark.parametrize(("record", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_a_layout_that_says_nothing_here_is_refused_by_name(record: Record, words: str, read: Read):
    with pytest.raises(DataError, match=rf"records.jsonl.*{words}"):
        read(record)
