"""YAML as people mean it: ``2e-5`` is a number, ``off`` and a date are text, and a key given twice is a mistake.

PyYAML follows YAML 1.1, where ``2e-5`` is text (no dot), ``off`` is false, ``010`` is 8, ``1:30`` is 90 and
``2024-05-01`` is a date. Here plain scalars follow the core schema of YAML 1.2, and a key that takes text takes them as
they are written.
"""

import re
from collections.abc import Callable
from typing import Any, Final

import yaml
from yaml.constructor import ConstructorError

from outsize.errors import ConfigError

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"  # `<<`, of YAML 1.1 alone, and in use
# YAML 1.2.2, 10.3.2: the core schema. What matches none of them is text.
_CORE: Final = {
    f"{_TAG}null": r"null|Null|NULL|~|",
    f"{_TAG}bool": r"true|True|TRUE|false|False|FALSE",
    f"{_TAG}int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    f"{_TAG}float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
# Far more than any configuration has.
_MOST_NODES = 100_000
TakesText = Callable[[str, str], bool]


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2 scalars and unique keys."""

    yaml_implicit_resolvers = {"<": [(_MERGE, re.compile(r"^(?:<<)$"))]}  # noqa: RUF012 - as in the base

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_whole(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which quotes text that a reader of either version would take for something else."""


_Loader.add_constructor(f"{_TAG}int", _Loader.construct_whole)
for _tag, _pattern in _CORE.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), None)


def parse_yaml(
    text: str, source: str, takes_text: TakesText = lambda section, key: False, at: tuple[str, ...] = ()
) -> Any:
    """Return the value that YAML ``text`` describes; ``source`` is where it was written, for messages.

    Args:
        text: sections, or what is ``at`` a section or key.
        source: where the text was written.
        takes_text: whether a key of a section takes text alone, so that ``2024`` is four characters there.
        at: section and key that the text is the value of.

    Raises:
        ConfigError: the text is not YAML, or gives a key twice.
    """
    loader = None
    try:
        loader = _Loader(text)  # which refuses characters that YAML has not
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node, {})
        _leave_as_written(node, takes_text, at)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{source}{line}: {problem}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # PyYAML leaves what it makes of a tag to Python: `!!int x`, a list as a key, a thousand brackets.
        raise ConfigError(f"{source}: not a configuration: {type(error).__name__}: {error}") from error
    finally:
        if loader is not None:
            loader.dispose()


def _check_size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Return how many nodes there are below one, with aliases written out; some lines of these can stand for billions.

    Raises:
        ConstructorError: there are too many, or one stands for itself.
    """
    known = sizes.get(id(node))
    if known == 0:
        raise ConstructorError(None, None, "an alias stands for what it is a part of", node.start_mark)
    if known is None:
        sizes[id(node)] = 0  # not known yet
        below = [node.value] if isinstance(node, yaml.ScalarNode) else list(node.value)
        members = [each for entry in below for each in (entry if isinstance(entry, tuple) else (entry,))]
        known = 1 + sum(_check_size(each, sizes) for each in members if isinstance(each, yaml.Node))
        if known > _MOST_NODES:
            raise ConstructorError(
                None, None, f"more than {_MOST_NODES:,} values, with aliases written out", node.start_mark
            )
        sizes[id(node)] = known
    return known


def _leave_as_written(node: yaml.Node, takes_text: TakesText, at: tuple[str, ...]) -> None:
    """Have names of keys, and values of keys that take text, be text."""
    is_text = len(at) > 1 and takes_text(at[0], at[1])
    if isinstance(node, yaml.ScalarNode):
        if is_text and node.style is None and node.tag != f"{_TAG}null":
            node.tag = f"{_TAG}str"
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _leave_as_written(value, takes_text, at)
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name and key.tag != _MERGE:
                key.tag = f"{_TAG}str"
            _leave_as_written(value, takes_text, at if key.tag == _MERGE else (*at, name))


def dump_yaml(value: Any) -> str:
    """Return ``value`` as YAML text that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)
