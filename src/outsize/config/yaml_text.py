"""YAML as people mean it: ``2e-5`` is a number, a date is text, and a key given twice is a mistake.

PyYAML follows YAML 1.1, where ``2e-5`` is text (no dot), ``1:30`` is 90 and ``2024-05-01`` is a date; here
numbers follow YAML 1.2.
"""

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from outsize.errors import ConfigError

_NUMBERS = {
    "tag:yaml.org,2002:int": r"^[-+]?(?:0|[1-9][0-9_]*)$",
    "tag:yaml.org,2002:float": r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?$"
    r"|^[-+]?[0-9]+[eE][-+]?[0-9]+$|^[-+]?\.(?:inf|Inf|INF)$|^\.(?:nan|NaN|NAN)$",
}
_AS_TEXT = ("tag:yaml.org,2002:timestamp",)


class _Loader(yaml.SafeLoader):
    """The safe loader with YAML 1.2 numbers and unique keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """The safe dumper, which quotes what `_Loader` would take for a number."""


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (*_NUMBERS, *_AS_TEXT)]
        for first, resolvers in _class.yaml_implicit_resolvers.items()
    }
    for _tag, _pattern in _NUMBERS.items():
        _class.add_implicit_resolver(_tag, re.compile(_pattern), list("-+.0123456789"))


def parse_yaml(text: str, source: str) -> Any:
    """Return the value that YAML ``text`` describes; ``source`` is where it was written, for messages.

    Raises:
        ConfigError: the text is not YAML, or gives a key twice.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{source}{line}: {problem}") from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        # PyYAML leaves what it makes of a tag to Python: `!!int x`, a list as a key, a thousand brackets.
        raise ConfigError(f"{source}: not a configuration: {type(error).__name__}: {error}") from error


def dump_yaml(value: Any) -> str:
    """Return ``value`` as YAML text that `parse_yaml` reads back to an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=110)
