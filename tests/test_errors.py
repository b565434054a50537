import inspect
import pickle

import pytest

import outsize
from outsize import errors


def all_errors():
    return [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]


def test_every_error_is_an_outsize_error_and_drawn_in_the_tree():
    for cls in all_errors():
        assert issubclass(cls, errors.OutsizeError)
        assert cls.__name__ in errors.__doc__


def test_every_error_is_public():
    assert {cls.__name__ for cls in all_errors()} <= set(outsize.__all__)


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        (errors.CheckpointError, errors.ModelError),
        (errors.BudgetExceededError, errors.StorageError),
    ],
)
def test_a_handler_for_a_branch_catches_its_leaves(child, parent):
    with pytest.raises(parent):
        raise child("message")


def test_an_infeasible_plan_says_by_how_much_per_tier():
    error = errors.InfeasiblePlanError("three slots do not fit", {"device": 12 * 2**20, "host": 512})
    assert str(error) == "three slots do not fit (short: device by 12.00 MiB, host by 512 B)"
    assert error.short_by == {"device": 12 * 2**20, "host": 512}


def test_an_infeasible_plan_goes_to_another_process_with_what_was_found():
    error = errors.InfeasiblePlanError(lambda: "three slots do not fit", {"device": 512})
    arrived = pickle.loads(pickle.dumps(error))
    assert str(arrived) == str(error) == "three slots do not fit (short: device by 512 B)"
    assert arrived.short_by == {"device": 512}


def test_an_error_of_a_model_is_of_the_class_that_its_code_raised_but_for_what_ends_iterations():
    raised = errors.model_raised("the model raised", KeyError("key"))
    assert isinstance(raised, errors.ModelError)
    assert isinstance(raised, KeyError)
    assert str(raised) == "the model raised"
    assert type(pickle.loads(pickle.dumps(raised))) is errors.ModelError
    assert type(errors.model_raised("the model raised", StopIteration())) is errors.ModelError
