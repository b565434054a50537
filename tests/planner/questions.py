"""Small models on small machines, for the tests of predictions."""

from dataclasses import fields

from outsize.hardware.cards.presets import parse_gpus
from outsize.model.sizes.spec_from_config import read_shape, spec_from_config
from outsize.model.sizes.workload import count_workload
from outsize.planner.predict.question import Question
from outsize.planner.search.sizing import PlanOptions
from outsize.planner.search.step_plan import Budgets

GIB = 2**30
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


OPTIONS = {field.name for field in fields(PlanOptions)} - {"home", "microbatches"}


def ask(gpus="4090", *, config=CONFIG, budgets=None, seq_len=1024, **changes):
    options = {name: changes.pop(name) for name in OPTIONS & changes.keys()}
    machine = parse_gpus(gpus)
    shape = read_shape(config)
    return Question(
        model=spec_from_config(config, "bf16"),
        machine=machine,
        budgets=budgets or Budgets(device=20 * GIB, host=100 * GIB, disk=1000 * GIB),
        sequences=changes.pop("sequences", 16),
        options=PlanOptions(home="host", below="host", **options),
        seq_len=seq_len,
        workload_of=lambda count: count_workload(shape, "bf16", sequences=count, seq_len=seq_len),
        **changes,
    )
