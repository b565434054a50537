"""How a parameter steps, from what a user says of the optimizer: one of our own, or a class of torch's."""

import importlib

from outsize.config.optimizer_section import OptimizerConfig
from outsize.errors import ConfigError
from outsize.optim.optimizer_names import named
from outsize.optim.torch_rule import rule_of_class
from outsize.optim.torch_trial import torch_class
from outsize.optim.update import UpdateRule, WholeRule

# Settings of which a plan makes something, and not the rule.
_OF_THE_RUN = ("ns_on",)


def rule_of(optimizer: OptimizerConfig) -> UpdateRule | WholeRule:
    """Return how a parameter steps; the learning rate comes with each step.

    Raises:
        ConfigError: the optimizer does not take its arguments.
    """
    own = named(optimizer.name)
    if own is None:
        return rule_of_class(torch_class(optimizer.name, optimizer.args), optimizer.weight_decay)
    module, _, name = own.rule.rpartition(".")
    made = getattr(importlib.import_module(module), name)
    settings = {key: getattr(optimizer, key) for key in own.keys if key not in _OF_THE_RUN}
    rule: UpdateRule | WholeRule
    try:
        rule = getattr(made, "of", made)(weight_decay=optimizer.weight_decay, **settings, **optimizer.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.args: {optimizer.name} refuses them: {error}") from error
    return rule
