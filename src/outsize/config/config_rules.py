"""Read a configuration's YAML text, and refuse combinations of keys that cannot be.

YAML is read as people mean it: ``2e-5`` is a number, ``off`` and a date are text, and a key given twice is a mistake.
PyYAML follows YAML 1.1, where ``2e-5`` is text (no dot), ``off`` is false, ``010`` is 8, ``1:30`` is 90 and
``2024-05-01`` is a date. Here plain scalars follow the core schema of YAML 1.2, and a key that takes text takes them as
they are written.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import yaml
from yaml.constructor import ConstructorError

from outsize.choices import OBJECTIVES_OF
from outsize.errors import ConfigError
from outsize.optim.optimizer_names import OWN, users_of_keys

if TYPE_CHECKING:
    from outsize.config.messages import Config


# What a trainer of another library does as by default.
_DEFAULT_ALONE = (
    *("data.window", "data.weight", "train.loss_function", "train.neftune_noise_alpha", "train.on_nonfinite"),
    *("optimizer.name", "optimizer.layer_decay", "optimizer.groups", "optimizer.gradients"),
)


def contradictions(config: "Config") -> list[str]:
    """Return one line ``key: what is wrong, and what to try`` for every combination that cannot be."""
    rules = (
        _portions,
        _warmup,
        _prefetch,
        _lora,
        _settings,
        _clip,
        _masters,
        _evaluation,
        _packing,
        _window,
        _masking,
        _loss,
        _objective,
        _compile,
        _kernels,
    )
    return [line for rule in rules for line in rule(config)]


def _portions(config: "Config") -> list[str]:
    """A step is a whole number of sequences, and at least one of them per microbatch."""
    seq_len, microbatches = config.data.seq_len, config.microbatches
    if config.train.tokens_per_step is not None and config.train.batch_size is not None:
        return ["train.batch_size: give train.tokens_per_step or train.batch_size, not both"]
    if config.tokens_per_step % seq_len:
        below = max(config.tokens_per_step // seq_len, 1) * seq_len
        return [
            f"train.tokens_per_step: {config.tokens_per_step} is not a multiple of data.seq_len ({seq_len}); "
            f"try {below} or {below + seq_len}"
        ]
    if config.sequences_per_step < microbatches:
        return [
            f"train.microbatches: {microbatches} microbatches need as many sequences, but "
            f"{config.tokens_per_step} tokens per step are {config.sequences_per_step} of {seq_len} tokens; "
            f"lower train.microbatches or raise train.tokens_per_step"
        ]
    return []


def _masking(config: "Config") -> list[str]:
    """A token that is to be predicted becomes the mask token, or any, or stays: shares of one."""
    masked, random = config.data.mask_replace_prob, config.data.random_replace_prob
    if masked + random > 1:
        return [
            f"data.random_replace_prob: {random:g} and data.mask_replace_prob, {masked:g}, are more than all; lower "
            "one of them"
        ]
    return []


def _loss(config: "Config") -> list[str]:
    if config.train.loss == "chunked" and config.train.loss_function is not None:
        return [
            "train.loss: chunked is a loss by itself, and train.loss_function another; leave one of the two out"
        ]
    return []


def _objective(config: "Config") -> list[str]:
    objective = config.train.objective
    if objective == "sft":
        return []
    refusals = refused_by_trainers(config, f"with train.objective={objective}")
    if objective in OBJECTIVES_OF["teacher"] and config.train.teacher is None:
        refusals.append(f"train.teacher: train.objective={objective} learns from another model; name it")
    return refusals


def refused_by_trainers(config: "Config", where: str) -> list[str]:
    """Return one line for every setting that a trainer of another library cannot follow."""
    refusals = []
    for key in _DEFAULT_ALONE:
        section, _, name = key.partition(".")
        values = getattr(config, section)
        if getattr(values, name) != type(values).model_fields[name].default:
            refusals.append(f"{key}: {where} it has no other value than by default; leave it out")
    if config.lora.begins_with is not None:
        refusals.append(
            f"lora.from: {where} adapters begin anew; merge those that exist into the model (outsize export --merge, "
            "or PEFT's merge_and_unload), and name that as model.path"
        )
    if config.optimizer.clip == "unit":
        refusals.append(f"optimizer.clip: {where} it is global or none")
    if config.model.dtype == "fp16":
        refusals.append(f"model.dtype: {where} losses are not scaled, as fp16 needs; use bf16 or fp32")
    return refusals


def _compile(config: "Config") -> list[str]:
    """What is compiled returns nothing from within, and has kernels for each length."""
    train, activations = config.train, config.memory.activations
    refused = {
        "train.mlp_parts: 1": train.mlp_parts > 1,
        "memory.activations: auto": activations.endswith(("-attention", "-products")),
        "data.group_by_length: false": config.data.is_grouped,
    }
    compiles = config.model.compile == "blocks"
    return [
        f"model.compile: blocks goes with {key}; or set it off"
        for key in refused
        if compiles and refused[key]
    ]


def _kernels(config: "Config") -> list[str]:
    """A compiler makes such kernels itself; and an MLP in parts runs its model's own forward."""
    refused = {
        "model.compile: off": config.model.compile != "off",
        "train.mlp_parts: 1": config.train.mlp_parts > 1,
    }
    kernels = config.model.kernels
    return [
        f"model.kernels: {kernels} goes with {key}; or set it none"
        for key in refused
        if kernels != "none" and refused[key]
    ]


def _warmup(config: "Config") -> list[str]:
    optimizer, steps = config.optimizer, config.train.steps
    if optimizer.warmup_steps and optimizer.warmup_ratio:
        return ["optimizer.warmup_ratio: give optimizer.warmup_steps or optimizer.warmup_ratio, not both"]
    if optimizer.min_lr > optimizer.lr:
        return [f"optimizer.min_lr: {optimizer.min_lr:g} is above optimizer.lr ({optimizer.lr:g}); lower it"]
    if config.train.epochs is None and config.warmup_steps >= steps:
        return [
            f"optimizer.warmup_steps: {config.warmup_steps} steps of warm-up do not fit before the end of "
            f"train.steps ({steps}); lower it, for example to 0, or train for more steps"
        ]
    return []


def _prefetch(config: "Config") -> list[str]:
    slots, prefetch = config.memory.slots, config.memory.prefetch
    if slots is not None and prefetch is not None and prefetch >= slots:
        return [
            f"memory.prefetch: {prefetch} units ahead of the one that computes need {prefetch + 1} slots, "
            f"but memory.slots is {slots}"
        ]
    return []


def _lora(config: "Config") -> list[str]:
    if config.train.method == "lora" and config.model.freeze:
        return ["model.freeze: with train.method=lora the whole model is frozen; leave it out"]
    return []


def _settings(config: "Config") -> list[str]:
    """An optimizer has settings of its own, and those of another change nothing."""
    optimizer, fields = config.optimizer, type(config.optimizer).model_fields
    mine = OWN[optimizer.name].keys if optimizer.name in OWN else ()
    state = () if optimizer.name in OWN else ("state",)
    ways = "leave it out, {}set optimizer.name={}{}"
    between = ("or ", "") if optimizer.name in OWN else ("", ", or say what a class takes in optimizer.args")
    refusals = [
        f"optimizer.{key}: {optimizer.name} has none; "
        + ways.format(between[0], " or ".join(users), between[1])
        for key, users in {**users_of_keys(), **dict.fromkeys(state, tuple(OWN))}.items()
        if key not in mine and getattr(optimizer, key) != fields[key].default
    ]
    for key in optimizer.args if optimizer.name in OWN else ():
        if key not in OWN[optimizer.name].args:
            refusals.append(
                f"optimizer.args: {optimizer.name} takes no {key}; say its settings as keys of optimizer, or name a "
                "class, e.g. torch.optim.AdamW"
            )
    if not (optimizer.name in OWN and OWN[optimizer.name].products) and not all(
        group.muon for group in optimizer.groups
    ):
        refusals.append(
            f"optimizer.groups: muon: {optimizer.name} is another; leave it out, or set optimizer.name=muon"
        )
    return refusals


def _clip(config: "Config") -> list[str]:
    if (
        config.optimizer.clip == "unit"
        and config.train.on_nonfinite == "skip"
        and config.optimizer.max_grad_norm
    ):
        return [
            "optimizer.clip: unit steps a unit before the gradients of all are known, and train.on_nonfinite=skip "
            "needs them; use optimizer.clip=global, or train.on_nonfinite=raise"
        ]
    return []


def _evaluation(config: "Config") -> list[str]:
    if config.eval.data is not None and config.eval.split:
        return ["eval.split: give eval.data or eval.split, not both"]
    return []


def _masters(config: "Config") -> list[str]:
    if config.optimizer.masters.startswith("split") and config.model.dtype in ("fp32", "fp16"):
        return [
            f"optimizer.masters: only those of bf16 weights can be split, not {config.model.dtype}; leave it auto"
        ]
    return []


def _packing(config: "Config") -> list[str]:
    """FlashAttention reads borders off positions only where a microbatch is one sequence, and takes no mask."""
    if config.data.pack == "documents" and config.model.attention == "flash_attention_2":
        return [
            "data.pack: documents are kept apart by a mask, and flash_attention_2 takes none; try "
            "model.attention: sdpa, or data.pack: none"
        ]
    return []


def _window(config: "Config") -> list[str]:
    """An order within windows knows no end of the data, and is of one source."""
    data, needs = config.data, "needs all data tokenised before the run begins; leave data.window out"
    if data.window is None:
        return []
    refused = {
        "data.pack": data.pack != "stream",
        "data.more": bool(data.more),
        "data.weight": data.weight != 1,
        "train.epochs": config.train.epochs is not None,
        "eval.split": bool(config.eval.split),
    }
    return [f"data.window: {key} {needs}" for key, is_set in refused.items() if is_set]


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
        keys: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in keys:
                raise ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            keys.add(key.value)
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
    """Return how many nodes there are below one, with aliases written out: a few lines can stand for billions."""
    size_before = sizes.get(id(node))
    if size_before == 0:
        raise ConstructorError(None, None, "an alias stands for what it is a part of", node.start_mark)
    if size_before is None:
        sizes[id(node)] = 0  # not known yet
        below = [node.value] if isinstance(node, yaml.ScalarNode) else list(node.value)
        members = [each for entry in below for each in (entry if isinstance(entry, tuple) else (entry,))]
        size_before = 1 + sum(_check_size(each, sizes) for each in members if isinstance(each, yaml.Node))
        if size_before > _MOST_NODES:
            raise ConstructorError(
                None, None, f"more than {_MOST_NODES:,} values, with aliases written out", node.start_mark
            )
        sizes[id(node)] = size_before
    return size_before


def _leave_as_written(node: yaml.Node, takes_text: TakesText, at: tuple[str, ...]) -> None:
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
