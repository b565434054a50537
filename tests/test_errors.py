import errno
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


class OwnError(LookupError):
    """An error that is made of two things, and keeps one in a slot."""

    __slots__ = ("slot",)

    def __new__(cls, value, slot):
        return super().__new__(cls, value)

    def __init__(self, value, slot):
        super().__init__(value)
        self.value, self.slot = value, slot

    @property
    def twice(self):
        return 2 * self.value


@pytest.mark.parametrize(
    ("error", "names"),
    [
        (
            OSError(errno.ENOENT, "No such file", "a", None, "b"),
            ("errno", "strerror", "filename", "filename2"),
        ),
        (PermissionError(errno.EACCES, "not you"), ("errno", "strerror", "filename")),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), ("encoding", "object", "start", "end", "reason")),
        (SyntaxError("bad", ("file.py", 3, 4, "text")), ("msg", "filename", "lineno", "offset", "text")),
        (ImportError("no module", name="x", path="y"), ("msg", "name", "path")),
        (AttributeError("none", name="x", obj=[1]), ("name", "obj")),
        (ExceptionGroup("some", [ValueError("one")]), ("message", "exceptions")),
        (KeyError("key"), ()),
        (OwnError(3, slot="here"), ("value", "slot", "twice")),
    ],
    ids=lambda each: type(each).__name__,
)
def test_an_error_of_a_model_has_the_attributes_of_what_its_code_raised(error, names):
    error.add_note("a note")
    raised = errors.model_raised("the model raised", error)
    assert isinstance(raised, type(error))
    assert str(raised) == "the model raised"
    for name in ("args", "__notes__", *names):
        assert getattr(raised, name) == getattr(error, name)
    arrived = pickle.loads(pickle.dumps(raised))
    assert (type(arrived), str(arrived)) == (errors.ModelError, "the model raised")
