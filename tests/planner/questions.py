"""Small models on small machines, for the tests of predictions."""

from dataclasses import fields

from counting import counted
from outsize.hardware.cards import parse_gpus
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
    counts = counted(config)
    return Question(
        model=counts.spec,
        machine=machine,
        budgets=budgets or Budgets(device=20 * GIB, host=100 * GIB, disk=1000 * GIB),
        sequences=changes.pop("sequences", 16),
        options=PlanOptions(home="host", below="host", **options),
        seq_len=seq_len,
        workload_of=lambda count: counts.workload(count, seq_len),
        **changes,
    )
