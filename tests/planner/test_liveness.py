from dataclasses import replace

from hypothesis import given

from outsize.planner.liveness import ActivationMeter, peak_activations
from outsize.planner.program import parse, render_op
from outsize.planner.schedule import build_step
from planner.layouts import layouts, make_layout


def meter(text, layout, boundary_bytes):
    found = ActivationMeter(layout, boundary_bytes)
    return {render_op(op): tuple(found.add(op)) for op in parse(text)}


def test_inputs_are_kept_for_the_backward_and_gradients_take_their_place():
    live = meter("F 0.0@w0; F 1.0@w0; FB 2.0@w0; B 1.0@w0; B 0.0@w0", make_layout(3), (0, 10, 3))
    assert [device for device, _ in live.values()] == [10, 13, 16, 23, 10]


def test_the_ids_are_not_counted():
    assert peak_activations(parse("F 0.0@w0; FB 1.0@w0; B 0.0@w0"), make_layout(2), (999, 1)) == (2, 0)


def test_inputs_below_the_lowest_backward_are_not_kept():
    layout = make_layout(3, trainable=(False, False, True))
    live = meter("F 0.0@w0; F 1.0@w0; FB 2.0@w0", layout, (0, 10, 3))
    assert [device for device, _ in live.values()] == [10, 13, 3]


def test_a_save_counts_until_something_has_waited_for_it():
    layout = make_layout(5, offload=frozenset({1, 2, 3}))
    live = meter(
        "F 0.0@w0; F 1.0@w0; SAVE 1.0@w0; F 2.0@w0; SAVE 2.0@w0; F 3.0@w0; SAVE 3.0@w0; FETCH 3.0@w0",
        layout,
        (0, 10, 10, 10, 10),
    )
    assert live == {
        "F 0.0@w0": (10, 0),
        "F 1.0@w0": (20, 0),
        "SAVE 1.0@w0": (20, 10),
        "F 2.0@w0": (30, 10),  # saved, but nothing has waited for it
        "SAVE 2.0@w0": (30, 20),
        "F 3.0@w0": (30, 20),  # waits for the first SAVE
        "SAVE 3.0@w0": (30, 30),
        "FETCH 3.0@w0": (20, 30),  # waits for all SAVEs
    }


@given(layouts())
def test_everything_is_freed_in_the_end(layout):
    boundary_bytes = tuple(range(1, layout.num_streamed + 1))
    found = ActivationMeter(layout, boundary_bytes)
    for op in build_step(layout):
        assert min(found.add(op)) >= 0
    # What is left belongs to the lowest backward: its input gradient is not made, its input is consumed.
    assert (found._device, found._below) == (0, 0)


def peak(num_units, num_microbatches, offload):
    layout = make_layout(num_units, num_microbatches=num_microbatches)
    layout = replace(layout, offload=frozenset(layout.offloadable) if offload else frozenset())
    return peak_activations(build_step(layout), layout, (0,) + (1,) * (num_units - 1))


def test_with_offload_device_bytes_do_not_depend_on_the_number_of_units():
    assert peak(10, 3, offload=True).device_bytes == peak(40, 3, offload=True).device_bytes
    assert peak(40, 3, offload=False).device_bytes >= 3 * 38
    assert peak(40, 3, offload=True).below_bytes == 3 * 38


def test_with_offload_each_microbatch_carries_one_tensor_from_unit_to_unit():
    # Beside these: the output in the making, and one input on its way out; or fetched, being used and on its way.
    assert [peak(10, m, offload=True).device_bytes for m in (4, 5, 6)] == [7, 8, 9]
