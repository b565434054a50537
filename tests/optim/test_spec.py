import pytest

from contracts.home_contract import planes_for
from outsize.optim.optimizer_spec import (
    StateLayout,
    masters_for,
)


@pytest.mark.parametrize(("dtype", "num_bytes", "master"), [
    ("fp32", 16, False), ("bf16", 18, True), ("fp16", 18, True),
])  # fmt: skip
def test_bytes_and_master_by_dtype(dtype, num_bytes, master):
    assert StateLayout(dtype=dtype).bytes_per_parameter == num_bytes
    assert ("master" in planes_for(dtype)) == master


def test_a_step_reads_the_state_and_writes_all_but_the_gradient():
    assert StateLayout(dtype="bf16").read_planes == ("master", "exp_avg", "exp_avg_sq", "gradient")
    assert StateLayout(dtype="bf16").write_planes == ("weights", "master", "exp_avg", "exp_avg_sq")
    assert StateLayout(dtype="fp32").write_planes == ("weights", "exp_avg", "exp_avg_sq")


def test_the_table_cannot_be_changed_by_a_caller():
    planes_for("fp32").clear()
    assert planes_for("fp32") == {"weights": 4, "exp_avg": 4, "exp_avg_sq": 4, "gradient": 4}


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="fp8"):
        planes_for("fp8")


@pytest.mark.parametrize(("count", "moments", "num_bytes"), [
    (2, "fp32", 12.125), (2, "int8", 6.03125), (1, "fp32", 8.125), (1, "bf16", 6.0), (1, "int8", 5.015625),
    (0, "fp32", 4.125),
])  # fmt: skip
def test_bytes_of_a_home_by_moments(count, moments, num_bytes):
    layout = StateLayout(dtype="bf16", masters="split", moments=moments, gradients="none", num_moments=count)
    assert layout.bytes_per_parameter == num_bytes


@pytest.mark.parametrize(("count", "moments", "num_bytes"), [
    (2, "int8", 5.03125), (2, "fp32", 11.0), (1, "int8", 4.015625), (0, "fp32", 3.0),
])  # fmt: skip
def test_bytes_of_a_home_whose_masters_have_24_bits(count, moments, num_bytes):
    layout = StateLayout(
        dtype="bf16", masters="split24", moments=moments, gradients="none", num_moments=count
    )
    assert layout.bytes_per_parameter == num_bytes
    assert not layout.exact
    assert "masters in 24 bits" in layout.lossy


@pytest.mark.parametrize(("layout", "num_bytes"), [
    (StateLayout(dtype="fp32"), 28),
    (StateLayout(dtype="bf16"), 30),  # master, moments and gradient; all but that, and the weights
    (StateLayout(dtype="bf16", masters="split"), 28),
    (StateLayout(dtype="bf16", masters="split", gradients="bf16"), 26),
    (StateLayout(dtype="bf16", masters="split", gradients="none"), 28),  # an fp32 one in a ring
    (StateLayout(dtype="bf16", masters="split", moments="int8", gradients="bf16"), 14.0625),
    (StateLayout(dtype="bf16", masters="split24", moments="int8", gradients="bf16"), 12.0625),
    (StateLayout(dtype="bf16", masters="split", num_moments=1), 20),
    (StateLayout(dtype="fp32", num_moments=0), 12),
])  # fmt: skip
def test_a_step_reads_and_writes_each_plane_once(layout, num_bytes):
    assert layout.step_bytes == num_bytes


@pytest.mark.parametrize(("wanted", "dtype", "moments", "kernels", "masters"), [
    ("auto", "bf16", "fp32", True, "split"),
    ("auto", "bf16", "fp32", False, "separate"),
    ("auto", "bf16", "int8", False, "split"),
    ("auto", "fp32", "int8", True, "separate"),
    ("auto", "fp16", "fp32", True, "separate"),
    ("separate", "bf16", "int8", True, "separate"),
    ("split", "bf16", "fp32", False, "split"),
    ("split24", "bf16", "fp32", True, "split24"),
])  # fmt: skip
def test_masters_are_split_by_themselves_where_kernels_step_them(wanted, dtype, moments, kernels, masters):
    assert masters_for(wanted, dtype, moments, kernels=kernels) == masters
