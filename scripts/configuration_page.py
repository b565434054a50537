"""Write docs/configuration.md from the models in `outsize.config`: ``configuration_page.py [--check]``."""

import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from outsize.config import Config

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

<!-- Written by `make docs` from the sections in src/outsize/config; change it there. -->

A run is described by a YAML file with ten sections, every key of which has a default except the two paths:

```yaml
model:
  path: models/llama-3-8b
data:
  path: corpus/
  seq_len: 2048
train:
  steps: 1000
  microbatches: 8
optimizer:
  lr: 2e-5
memory:
  device_memory: 20GiB
  home: disk
```

A value is looked for in this order; the first place that has it wins:

1. the flag of the command, e.g. `--steps 1000`;
2. `--set section.key=value`, the value written as in YAML; the last one wins;
3. the environment variable `OUTSIZE_<SECTION>__<KEY>`, e.g. `OUTSIZE_TRAIN__STEPS=1000`;
4. the file;
5. the default.

Of `train.steps` and `train.epochs`, which say one thing in two ways, the one that comes first ends the other, and so it
is with `train.tokens_per_step` and `train.batch_size`: `--steps 5` trains 5 steps, whatever `epochs` the file has.

A key that does not exist is an error, and so is a value of another type than the table says: `"8"` is not a
number. Values are read as in YAML 1.2: only `true` and `false` are truths, and a key that takes text takes `off`,
`2024` or `1e5` as they are written. A setting that has no effect on the run is reported as a note. `outsize train
--dry-run` prints the configuration that results, and every run keeps its own as `config.yaml` in its run directory.
Relative paths start at the working directory.
"""

NOT_KEYS = """\
One is no key of the configuration: `OUTSIZE_NATIVE=0` turns the [kernels in C](optimizers.md#kernels) and those of
[codecs on a GPU](codecs.md#what-it-costs-and-brings) off, and torch ops do the same work.
"""


def page() -> str:
    """Return the whole page."""
    sections = [_section(name, field) for name, field in Config.model_fields.items()]
    return "\n".join([INTRODUCTION, *sections, _variables()])


def _variables() -> str:
    """Return the names of all environment variables."""
    names = [
        f"OUTSIZE_{section.upper()}__{key.upper()}"
        for section, field in Config.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    ]
    words = "Each key has one, whose value is written as in YAML; the file is overridden, `--set` and flags override."
    return "\n".join(["## Environment variables", "", words, "", "```", *names, "```", "", NOT_KEYS])


def _section(name: str, field: FieldInfo) -> str:
    model = field.annotation
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    words = " ".join((model.__doc__ or "").split())
    lines = [f"## {name}", "", words, "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for key, entry in model.model_fields.items():
        default = "required" if entry.is_required() else f"`{_yaml(entry.default)}`"
        kind = _type(entry.annotation, entry.metadata)
        lines.append(
            f"| `{key}` | {kind} | {default} | {(entry.description or '').replace('|', chr(92) + '|')} |"
        )
    return "\n".join([*lines, ""])


def _type(annotation: Any, metadata: list[Any] | None = None) -> str:
    """Return a type in the words of a reader of YAML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if any("_size" in repr(item) for item in metadata or ()):
        return "size"
    if origin is Annotated:
        return _type(arguments[0], list(arguments[1:]))
    if origin is Literal:
        return ", ".join(f"`{argument}`" for argument in arguments)
    if origin is UnionType or str(origin) == "typing.Union":
        words = ["null" if argument is NoneType else _type(argument) for argument in arguments]
        return " or ".join(words).replace("true or false or", "true, false or")
    if origin is dict and arguments[1] is Any:
        return "values by name"
    if origin is dict:
        return f"{_type(arguments[1])} by name"
    if origin is tuple:
        return f"list of {_type(arguments[0])}" if Ellipsis in arguments else f"{len(arguments)} numbers"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "sections"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}[annotation]


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(list(value)) if isinstance(value, tuple) else str(value)


def main() -> None:
    """Write the page, or with ``--check`` fail if it is not current."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE.name} is not current; run: make docs")


if __name__ == "__main__":
    main()
