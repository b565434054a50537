import pytest

from outsize.optim.spec import (
    bytes_per_parameter,
    master_plane,
    planes_for,
    step_read_planes,
    step_write_planes,
)


@pytest.mark.parametrize(("dtype", "num_bytes", "master"), [
    ("fp32", 16, "weights"), ("bf16", 18, "master"), ("fp16", 18, "master"),
])  # fmt: skip
def test_bytes_and_master_by_dtype(dtype, num_bytes, master):
    assert bytes_per_parameter(dtype) == num_bytes
    assert master_plane(dtype) == master


def test_a_step_reads_the_state_and_writes_all_but_the_gradient():
    assert step_read_planes("bf16") == ("master", "exp_avg", "exp_avg_sq", "gradient")
    assert step_write_planes("bf16") == ("weights", "master", "exp_avg", "exp_avg_sq")
    assert step_write_planes("fp32") == ("weights", "exp_avg", "exp_avg_sq")


def test_the_table_cannot_be_changed_by_a_caller():
    planes_for("fp32").clear()
    assert planes_for("fp32") == {"weights": 4, "exp_avg": 4, "exp_avg_sq": 4, "gradient": 4}


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="fp8"):
        planes_for("fp8")
