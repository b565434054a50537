"""Where the values come from: flags, then ``--set``, environment variables, the file, and the defaults.

Every source is a tree of sections; the trees are laid over each other, and the result is checked once. Each
value remembers its source, so a mistake is reported with the place where it was written.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from outsize import files
from outsize.config.config_rules import dump_yaml, parse_yaml
from outsize.config.messages import Config, as_config_error, suggest
from outsize.errors import ConfigError

_PREFIX = "OUTSIZE_"
# A value that is no list, mapping or quoted text of YAML; and names with commas between, which are no pattern.
_BARE = re.compile(r"(?![\[{\"'!&#])\S")
_NAMES = re.compile(r"[\w.-]+(?:,[\w.-]+)+")
# Keys that say one thing in two ways: one that is given ends the other of a place that comes behind.
_RIVALS = (("train", "steps", "epochs"), ("train", "tokens_per_step", "batch_size"))
_SIZE_KEYS = ("device_memory", "host_memory", "disk_memory")

Tree = dict[str, Any]


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Return the configuration of a run.

    Args:
        path: a YAML file, or None where everything is said otherwise.
        overrides: texts ``section.key=value``, the values written as in YAML, lists also as ``a,b``; later ones win.
        flags: values by dotted key, e.g. ``{"train.steps": 10}``; None means that the flag was not given.
        environ: environment variables, those of the process by default; ``OUTSIZE_<SECTION>__<KEY>`` counts.
        defaults: values by dotted key that stand where no source has one.

    Raises:
        ConfigError: a source cannot be read, or a key, a value or a combination of them is wrong.
    """
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    tree: Tree = _unflatten((defaults or {}).items())
    origins: dict[str, str] = {}
    if path is not None:
        _lay_over(tree, origins, _read_file(Path(path)), str(path))
    for place in (
        [(branch, name) for name, branch in _from_environment(os.environ if environ is None else environ)],
        [
            *((_from_override(override), f"--set {override}") for override in overrides),
            (_unflatten(given.items()), "the command line"),
        ],
    ):
        _end_rivals(tree, [layer for layer, _ in place])
        for layer, source in place:
            _lay_over(tree, origins, layer, source)
    return parse_config(tree, origins, str(path or "a config file"))


def parse_config(
    tree: Mapping[str, Any], origins: Mapping[str, str] | None = None, file: str = "the config file"
) -> Config:
    """Return the configuration that a mapping of sections describes.

    Args:
        tree: sections by name, each a mapping of keys to values.
        origins: where each dotted key was written, for error messages.
        file: that messages name as the place to write what is missing.

    Raises:
        ConfigError: a key, a value or a combination of them is wrong; one line for each.
    """
    # Absent sections become empty ones, so that what is reported as missing is a key that can be given.
    complete = {"model": {}, "data": {}, **tree}
    try:
        return Config.model_validate(complete)
    except ValidationError as error:
        raise as_config_error(error, origins or {}, file) from None


def dump_config(config: Config) -> str:
    """Return ``config`` as YAML text that `load_config` reads back to an equal configuration."""
    tree = config.model_dump(mode="json")
    for key in _SIZE_KEYS:
        tree["memory"][key] = _exact_size(tree["memory"][key])
    return dump_yaml(tree)


def _exact_size(num_bytes: int | None) -> int | str | None:
    if num_bytes is None:
        return None
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return num_bytes


def _read_file(path: Path) -> Tree:
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"cannot read the config file {path}: {reason}; name a YAML file, docs/configuration.md"
        ) from error
    tree = parse_yaml(text, str(path), _takes_text)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected sections such as 'train:' with keys below them, found {tree!r}")
    return tree


def _from_override(override: str) -> Tree:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override}: write it as section.key=value, e.g. --set train.steps=10")
    path = tuple(key.strip().split(".", 1))
    return _unflatten([(key.strip(), _value(text, f"--set {override}", path))])


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, Tree]]:
    """Return ``(variable, its value as a tree)`` for every variable that names a key."""
    branches = []
    for name in sorted(environ):
        rest = name.removeprefix(_PREFIX)
        starts_as_section = any(rest.startswith(f"{section.upper()}_") for section in Config.model_fields)
        if rest == name or not (starts_as_section or "__" in rest):
            continue
        section, _, key = rest.lower().partition("__")
        section_model = _section_model(section)
        if section_model is None or key not in section_model.model_fields:
            meant = suggest(f"{section}.{key}" if key else section.replace("_", ".", 1))
            hint = "see docs/configuration.md"
            if meant and "." in meant:
                hint = f"did you mean {_PREFIX}{meant.upper().replace('.', '__')}?"
            raise ConfigError(f"{name}: no such environment variable; {hint}")
        branches.append((name, {section: {key: _value(environ[name], name, (section, key))}}))
    return branches


def _value(text: str, source: str, path: tuple[str, ...]) -> Any:
    """Return what the text of one key means: YAML, and for a key that takes a list also ``a,b``."""
    field = _field(*path) if len(path) == 2 else None
    if field is not None and _is_listed(text, field.annotation):
        return [_item(part.strip(), source, path) for part in text.split(",")]
    return parse_yaml(text, source, _takes_text, path)


def _item(text: str, source: str, path: tuple[str, ...]) -> Any:
    return text if _takes_text(*path) else parse_yaml(text, source, _takes_text, path)


def _is_listed(text: str, annotation: Any) -> bool:
    """Whether a text is a list without brackets, for a key of that annotation."""
    listed = _shapes(annotation)
    if tuple not in listed or "," not in text or not _BARE.match(text.strip()):
        return False
    return str not in listed or bool(_NAMES.fullmatch(text.replace(" ", "")))


def _shapes(annotation: Any) -> set[Any]:
    """Return the types that an annotation accepts; of containers the container type alone."""
    origin = get_origin(annotation)
    if origin in (Annotated, Union, UnionType):
        parts = get_args(annotation)[: 1 if origin is Annotated else None]
        return {kind for part in parts for kind in _shapes(part)}
    return {origin or annotation}


def _section_model(section: str) -> type[BaseModel] | None:
    field = Config.model_fields.get(section)
    return cast("type[BaseModel]", field.annotation) if field else None


def _field(section: str, key: str) -> FieldInfo | None:
    section_model = _section_model(section)
    return section_model.model_fields.get(key) if section_model else None


def _takes_text(section: str, key: str) -> bool:
    """Return whether a key takes text, or lists of it, and nothing else."""
    field = _field(section, key)
    return field is not None and _kinds(field.annotation) - {NoneType} == {str}


def _kinds(annotation: Any) -> set[Any]:
    """Return the types of what an annotation takes, without the containers."""
    if get_origin(annotation) is Literal:
        return {type(choice) for choice in get_args(annotation)}
    parts = get_args(annotation)[: 1 if get_origin(annotation) is Annotated else None]
    return {kind for part in parts if part is not ... for kind in _kinds(part)} or {annotation}


def _unflatten(items: Iterable[tuple[str, Any]]) -> Tree:
    tree: Tree = {}
    for dotted, value in items:
        section, dot, key = dotted.partition(".")
        if dot:
            tree.setdefault(section, {})[key] = value
        else:
            tree[section] = value
    return tree


def _end_rivals(tree: Tree, layers: Sequence[Tree]) -> None:
    """Take from ``tree`` what ``layers``, which come before it, say in another way."""
    for section, *keys in _RIVALS:
        branches = [layer[section] for layer in layers if isinstance(layer.get(section), dict)]
        given = [key for key in keys if any(branch.get(key) is not None for branch in branches)]
        if given and isinstance(tree.get(section), dict):
            for key in set(keys).difference(given):
                tree[section].pop(key, None)


def _lay_over(tree: Tree, origins: dict[str, str], layer: Tree, source: str) -> None:
    """Put ``layer`` on top of ``tree``, key by key, and note where each key came from."""
    for section, content in layer.items():
        origins.setdefault(section, source)
        if content is None:  # a section with nothing below it
            tree.setdefault(section, {})
        elif not isinstance(content, dict):  # a mistake, kept so that it is reported
            tree[section] = content
        elif isinstance(tree.setdefault(section, {}), dict):
            tree[section] |= content
            origins.update({f"{section}.{key}": source for key in content})
