"""What a plain scalar is: the same in a file, after ``--set`` and in the environment, for every key of the schema."""

import math
from pathlib import Path
from typing import Any

import pytest

from outsize.config import Config, load, load_config
from outsize.config.messages import all_keys

# As in the core schema of YAML 1.2. YAML 1.1 makes truths of the first, and other numbers or dates of the next.
VALUES: dict[str, Any] = {
    **{word: word for word in ("off", "on", "yes", "no", "y", "N", "Off", "ON", "YES")},
    **{word: word for word in ("1:30", "2024-05-01", "1_000", "0b11", "=", "<<", "12e03.5")},
    "true": True,
    "False": False,
    "TRUE": True,
    "08": 8,
    "010": 10,
    "0o10": 8,
    "0x1F": 31,
    "+3": 3,
    "-3": -3,
    "0": 0,
    "1e-5": 1e-5,
    "1E5": 1e5,
    ".5": 0.5,
    "1.": 1.0,
    "-1.5e+3": -1500.0,
    ".inf": math.inf,
    "-.INF": -math.inf,
    **dict.fromkeys(("~", "null", "Null", "NULL", ""), None),
}
PROPERTIES = {
    f"{section}.{key}": {**about, "$defs": Config.model_json_schema()["$defs"]}
    for section, field in Config.model_fields.items()
    for key, about in field.annotation.model_json_schema()["properties"].items()
}


def kinds(about: dict[str, Any]) -> set[str]:
    """Types of JSON that a key takes, those of the items of its lists included."""
    inner = [*about.get("anyOf", ()), *about.get("prefixItems", ())]
    inner += [about[name] for name in ("items", "additionalProperties") if isinstance(about.get(name), dict)]
    own = about.get("type")
    found = {own} if isinstance(own, str) and own not in ("array", "object") else set()
    found |= {{str: "string", bool: "boolean"}[type(value)] for value in about.get("enum", ())}
    return found.union(*map(kinds, inner)) - {"null"}


def read(key: str, text: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a key becomes from each source, before it is checked."""
    section, _, name = key.partition(".")
    file = directory / "run.yaml"
    file.write_text(f"{section}:\n  {name}: {text}\n", encoding="utf-8")
    trees: list[dict[str, Any]] = []
    with monkeypatch.context() as patched:
        patched.setattr(load, "parse_config", lambda tree, *_: trees.append(tree))
        load_config(file, environ={})
        load_config(None, [f"{key}={text}"], environ={})
        load_config(None, environ={f"OUTSIZE_{section.upper()}__{name.upper()}": text})
    return [tree[section][name] for tree in trees]


@pytest.mark.parametrize("key", all_keys())
def test_a_plain_scalar_is_the_same_from_everywhere(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A key that takes text takes what is written, but for null; any other takes what the core schema makes of it."""
    is_text = kinds(PROPERTIES[key]) == {"string"}
    for text, value in VALUES.items():
        if text == "<<" and not is_text:
            continue  # merges mappings, and is refused
        expected = text if is_text and value is not None else value
        for found in read(key, text, tmp_path, monkeypatch):
            assert (type(found), found) == (type(expected), expected), text
        if is_text and value is not None:
            assert read(key, f"[{text}, {text}]", tmp_path, monkeypatch) == [[text, text]] * 3


@pytest.mark.parametrize("key", [key for key in all_keys() if "boolean" in kinds(PROPERTIES[key])])
def test_what_is_true_or_false_is_written_so(key: str, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(f"{key.replace('.', ': {')}: off}}\n")
    for how in ({"path": tmp_path / "run.yaml"}, {"overrides": [f"{key}=off"]}):
        with pytest.raises(load.ConfigError, match=rf"{key}: must be true(,| or) false.*, not 'off'"):
            load_config(**how, flags={"model.path": "m", "data.path": "d"}, environ={})


def choices(about: dict[str, Any]) -> list[Any]:
    return [*about.get("enum", ()), *(one for part in about.get("anyOf", ()) for one in choices(part))]


@pytest.mark.parametrize(
    ("key", "choice"), [(key, choice) for key in all_keys() for choice in choices(PROPERTIES[key])]
)
def test_every_choice_is_taken_as_the_page_writes_it(
    key: str, choice: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text = {True: "true", False: "false"}[choice] if isinstance(choice, bool) else str(choice)
    assert read(key, text, tmp_path, monkeypatch) == [choice] * 3
