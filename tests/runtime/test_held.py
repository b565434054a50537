import weakref

import torch

from outsize.runtime.forward.saved_tensors import SavedTensors


def test_what_is_held_is_shown_as_it_was_and_shares_its_memory():
    memory = torch.arange(12.0)
    held = SavedTensors()
    views = [memory[2:8].view(2, 3).t(), memory.view(torch.int32)[3:], memory[::4]]
    shown = [held.hold(view) for view in views]
    assert len(held.storages()) == 1
    for view, place in zip(views, shown, strict=True):
        again = place.tensor()
        assert torch.equal(again, view)
        assert (again.dtype, again.stride(), again.data_ptr()) == (view.dtype, view.stride(), view.data_ptr())


def test_memory_may_go_and_other_memory_may_take_its_place():
    held = SavedTensors()
    first, second = torch.arange(4.0), torch.arange(3)
    shown = [held.hold(tensor) for tensor in (first[1:], second)]
    copies = [storage.clone() for storage in held.storages()]
    held.take()
    assert held.storages() == []
    held.put(copies)
    first.zero_()
    assert [place.tensor().tolist() for place in shown] == [[1.0, 2.0, 3.0], [0, 1, 2]]
    assert shown[0].tensor().data_ptr() != first[1:].data_ptr()


def test_memory_that_goes_is_free_while_it_is_away():
    held = SavedTensors()
    made = torch.ones(3)
    shown = held.hold(made)
    assert shown.tensor().data_ptr() == made.data_ptr()
    memory = weakref.ref(made.untyped_storage())
    del made
    held.take()
    assert memory() is None
    held.put([torch.full((3,), 2.0).untyped_storage()])
    assert shown.tensor().tolist() == [2.0] * 3


def test_what_others_use_stays():
    held = SavedTensors()
    given, own = torch.ones(2), torch.ones(3)
    shown = held.hold(given[1:])
    held.hold(own)
    held.stay([given, torch.ones(5)])
    assert [storage.nbytes() for storage in held.storages()] == [12]
    held.take()
    assert shown.tensor().data_ptr() == given[1:].data_ptr()


def test_what_is_no_longer_looked_after_lives_as_long_as_it_is_shown():
    held = SavedTensors()
    shown = held.hold(torch.ones(3))
    held.clear()
    assert held.storages() == []
    assert shown.tensor().tolist() == [1.0] * 3
