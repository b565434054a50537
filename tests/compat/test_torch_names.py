"""Private names of torch: each does what its function in compat says, in the torch that is here."""

import threading
from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from outsize.compat import torch_private
from outsize.compat.torch_private import (
    OperationMode,
    allocations,
    allow_forms,
    compile_errors,
    compile_graph,
    counting_changes_of_views,
    fake_tensors,
    is_watched,
    of_all_threads,
    operations,
    schema_of,
    watching,
)
from outsize.runtime.trial.calibrate import form_operation


def test_trees_are_taken_apart_and_put_together_again():
    values = {"a": [1, (2, None)], "b": 3}
    leaves, structure = torch_private.flatten(values)
    assert leaves == torch_private.leaves_of(values) == [1, 2, None, 3]
    assert torch_private.unflatten(leaves, structure) == values
    assert torch_private.is_leaf(1)
    assert not torch_private.is_leaf([1])
    assert torch_private.map_leaves(str, [1, (2,)]) == ["1", ("2",)]
    assert torch_private.map_only(int, lambda n: n + 1, [1, "x"]) == [2, "x"]
    assert torch_private.leaves_of(values, is_leaf=lambda value: isinstance(value, list)) == [
        [1, (2, None)],
        3,
    ]


def test_a_mode_sees_operations_while_it_is_active_and_may_be_entered_twice():
    class Seen(OperationMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def handle(self, func, args, kwargs):
            self.names.append(str(func))
            return func(*args, **kwargs)

    assert not is_watched()
    with Seen() as seen:
        assert is_watched()
        torch.ones(2).add(1)
        with seen:
            torch.ones(2)
    torch.ones(2).mul(1)
    assert [name.split(".")[1] for name in seen.names] == ["ones", "add", "ones", "ones"]
    instead = torch.zeros(3)
    with watching(lambda func, args, kwargs: instead):
        assert torch.ones(2).shape == instead.shape


def test_another_thread_is_not_watched():
    found = []
    with OperationMode():
        thread = threading.Thread(target=lambda: found.append(is_watched()))
        thread.start()
        thread.join()
    assert found == [False]


def test_fake_tensors_have_a_form_and_no_values():
    with fake_tensors(allow_real=True):
        made = torch.empty(3, 4) @ torch.empty(4, 5)
    assert made.shape == (3, 5)
    assert type(made) is not Tensor


def test_a_view_made_below_autograd_counts_the_changes_of_what_it_shows():
    def follow(func, args, kwargs):
        with counting_changes_of_views():
            views.append(args[0].detach())
        return func(*args, **kwargs)

    views: list[Tensor] = []
    base = torch.zeros(2)
    with watching(follow):
        base.add_(1)
    assert torch_private.version_of(views[0]) == torch_private.version_of(base) == 1


def test_changes_are_counted_and_may_be_left_out():
    tensor = torch.zeros(2)
    tensor.add_(1)
    assert torch_private.version_of(tensor) == 1
    with torch_private.keeping_versions((tensor,)):
        tensor.add_(1)
    assert torch_private.version_of(tensor) == 1


def test_nodes_have_an_order_and_know_whether_they_will_run():
    leaf = torch.ones(2, requires_grad=True)
    before = torch_private.num_nodes()
    first = leaf * 2
    between = torch_private.num_nodes()
    second = first * 2
    assert torch_private.made_at(first.grad_fn) == before < between == torch_private.made_at(second.grad_fn)
    found = []
    first.register_hook(lambda _: found.append(torch_private.will_run(first.grad_fn)))
    second.sum().backward()
    assert found == [True]


def test_views_lie_in_one_memory():
    tensor = torch.zeros(4)
    assert torch_private.memory_key(tensor) == torch_private.memory_key(tensor[1:])
    assert torch_private.memory_key(tensor) == torch_private.storage_key(tensor.untyped_storage())
    assert torch_private.memory_key(tensor) != torch_private.memory_key(torch.zeros(4))


def test_what_a_module_holds_may_be_replaced():
    layer = nn.BatchNorm1d(3)
    assert torch_private.parameters_of(layer).keys() == {"weight", "bias"}
    assert torch_private.buffers_of(layer).keys() == {"running_mean", "running_var", "num_batches_tracked"}
    torch_private.parameters_of(layer)["weight"] = other = nn.Parameter(torch.ones(3))
    assert layer.weight is other


def test_hooks_are_seen_and_replaced():
    layer, ran = nn.Identity(), []
    layer.register_forward_hook(lambda *_: ran.append("behind"))
    layer.register_forward_pre_hook(lambda *_: ran.append("before"))
    assert [len(hooks) for hooks in torch_private.forward_hooks_of(layer)] == [1, 1]
    former = torch_private.replace_forward_hooks(layer, OrderedDict())
    layer(torch.ones(1))
    torch_private.replace_forward_hooks(layer, former)
    layer(torch.ones(1))
    assert ran == ["before", "before", "behind"]
    assert not torch_private.has_hooks_of_all()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert torch_private.has_hooks_of_all()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_seen(register: str):
    parameter = nn.Parameter(torch.ones(1))
    assert not torch_private.has_gradient_hooks(parameter)
    with getattr(parameter, register)(lambda _: None):
        assert torch_private.has_gradient_hooks(parameter)
        assert [len(hooks) for hooks in torch_private.gradient_hooks(parameter)] == [
            register == "register_hook",
            register != "register_hook",
        ]


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_shared_and_go_by_one_handle(register: str):
    parameter, other, ran = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1)), []
    handle = getattr(parameter, register)(lambda _: ran.append(register))
    torch_private.share_gradient_hooks(parameter, other)
    other.sum().backward()
    handle.remove()
    other.sum().backward()
    assert ran == [register]


def test_memory_of_tensors_is_told():
    seen = []
    torch.vmap(lambda each: seen.append(torch_private.has_memory(each)) or each)(torch.ones(2, 2))
    assert seen == [False]
    assert torch_private.has_memory(torch.ones(2))
    assert not torch_private.has_memory(torch.ones(2).to_sparse())


def test_a_weak_storage_keeps_its_key_and_no_byte():
    storage = torch.ones(1000).untyped_storage()
    key, weak = torch_private.storage_key(storage), cast(Any, torch_private.weak_storage(storage))
    assert not weak.expired()
    del storage
    assert weak.expired()
    others = [torch.ones(1000).untyped_storage() for _ in range(50)]
    assert key not in map(torch_private.storage_key, others)


def test_a_place_is_read_from_the_arguments_of_to():
    assert torch_private.place_to_move_to("cpu", torch.bfloat16) == (torch.device("cpu"), torch.bfloat16)
    assert torch_private.place_to_move_to(torch.float16) == (None, torch.float16)


def test_what_was_compiled_in_place_is_seen():
    module = torch.nn.Linear(2, 2)
    assert not torch_private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert torch_private.is_compiled_in_place(module)


def test_what_waits_for_a_gradient_is_seen():
    leaf = torch.ones(2, requires_grad=True)
    result = leaf * 2
    assert not torch_private.wants_gradient(result)
    result.retain_grad()
    assert torch_private.wants_gradient(result)
    torch.autograd.graph.register_multi_grad_hook([leaf], lambda _: None)
    assert all(map(torch_private.waits_for_others, torch_private.gradient_hooks(leaf)[0]))


def test_operations_that_this_torch_has_not_are_left_out():
    assert operations("mm.default", "mm.other", "no_such_operation.default") == {torch.ops.aten.mm.default}
    schema = schema_of(torch.ops.aten.add_.Tensor)
    assert [bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments] == [True, False, False]


@pytest.mark.parametrize(
    ("left", "right", "form"),
    [((6, 4), (2, 4, 5), (6, 5)), ((6, 4), (4, 5), (2, 6, 5)), ((2, 6, 4), (4, 5), (6, 5))],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_groups_have_a_form(left, right, form, dtype):
    with fake_tensors(allow_real=True), watching(form_operation):
        groups = torch.tensor([2, 4], dtype=torch.int32)
        made = torch.ops.aten._grouped_mm.default(
            torch.empty(left, dtype=dtype), torch.empty(right, dtype=dtype), groups
        )
    assert made.shape == form
    assert made.dtype is dtype


def test_allocations_and_releases_are_told_in_order():
    def work():
        kept = torch.empty(1024)
        torch.empty(256)
        return kept

    kept, changes = allocations(work)
    assert kept.shape == (1024,)
    assert sum(changes) == 4096
    assert sorted(changes) == [-1024, 1024, 4096]


def test_a_profile_of_all_threads_sees_one_that_stood_before():
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        begun.wait()
        torch.ones(3).tan()
        stop.set()

    thread = threading.Thread(target=work)
    thread.start()
    with torch.profiler.profile(experimental_config=of_all_threads(), acc_events=True) as profile:
        begun.set()
        stop.wait()
    thread.join()
    assert "aten::tan" in {event.name for event in profile.events()}


def test_the_fused_kernel_steps_as_adamw_does():
    torch.manual_seed(0)
    weights, gradient = torch.randn(2, 64)
    stepped = weights.clone()
    torch_private.fused_adamw(  # type: ignore[call-arg]
        stepped, gradient, *torch.zeros(2, 64), 1, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8
    )
    parameter = nn.Parameter(weights.clone())
    parameter.grad = gradient.clone()
    torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1, betas=(0.9, 0.99), fused=True).step()
    assert torch.equal(parameter, stepped)
    assert torch.equal(
        torch_private.norms([weights, gradient]), torch.stack([weights.norm(), gradient.norm()])
    )


def test_muon_multiplies_by_what_it_is_given():
    parameter = nn.Parameter(torch.randn(4, 4))
    parameter.grad = torch.randn(4, 4)
    called = []

    def instead(update: Tensor, *settings: object) -> Tensor:
        called.append(settings)
        return own(update, *settings)

    with torch_private.muon_products(instead) as own:
        torch.optim.Muon([parameter]).step()
    torch.optim.Muon([parameter]).step()
    assert len(called) == 1


def test_a_tensor_of_a_class_of_its_own_has_a_form_and_no_bytes():
    class Formed(Tensor):
        __torch_function__ = torch_private.no_function_override()

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return torch.zeros(5)

    made = torch_private.formed_like(Formed, torch.empty(2, 3).t(), torch.device("cpu"))
    assert (made.shape, made.stride()) == ((3, 2), (1, 3))
    assert made.exp().shape == (5,)


def test_subclasses_are_plain_tensors_for_a_while():
    class Told(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return "told"

    made = torch.ones(1).as_subclass(Told)
    assert made.exp() == "told"
    with torch_private.as_plain_tensors():
        assert made.exp() != "told"


def test_what_cannot_be_compiled_raises_an_error_that_is_known():
    def forward(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    allow_forms(64)
    assert torch._dynamo.config.recompile_limit >= 64
    with pytest.raises(compile_errors()):
        torch.compile(forward, fullgraph=True, backend="eager")(torch.ones(1))


def test_a_graph_is_compiled_by_the_backend_that_is_named():
    graphs_seen = []

    def backend(graph, inputs):
        graphs_seen.append(graph)
        return compile_graph("aot_eager", graph, inputs)

    x = torch.ones(2, requires_grad=True)
    torch.compile(lambda x: x * 3, backend=backend)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 3.0))
    assert len(graphs_seen) == 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_graph_that_is_compiled_in_another_thread_repeats_its_bits_if_all_else_does(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
):
    """Inductor's setting is of each thread, torch's of the process; blocks compile in threads of their own."""
    seen = []
    monkeypatch.setattr(
        torch._dynamo,
        "lookup_backend",
        lambda name: lambda graph, inputs: seen.append(torch._inductor.config.deterministic),
    )
    torch.use_deterministic_algorithms(deterministic)
    try:
        thread = threading.Thread(target=compile_graph, args=("inductor", None, []))
        thread.start()
        thread.join()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [deterministic]


def test_hooks_on_what_autograd_saves_are_seen():
    assert not torch_private.has_saving_hooks()
    with torch.autograd.graph.save_on_cpu():
        assert torch_private.has_saving_hooks()
