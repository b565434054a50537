"""The numbers of microbatches to try: all sequences, none twice, and enough for several workers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from outsize.planner.microbatches import FULL_TOKENS, PER_GPU, SIZES, simulated_cuts, step_cuts

SEQUENCES, SEQ_LEN = st.integers(1, 300), st.sampled_from([32, 1024, 2048, 32_768])


@settings(max_examples=40)
@given(SEQUENCES, SEQ_LEN, st.integers(1, 8))
def test_numbers_grow_and_none_is_more_than_there_are_sequences(sequences, seq_len, num_workers):
    for counts in (
        list(simulated_cuts(sequences, seq_len, num_workers)),
        list(step_cuts(sequences, seq_len, num_workers)),
    ):
        assert counts == sorted(set(counts))
        assert 1 <= counts[0] <= counts[-1] <= sequences


@given(SEQUENCES, SEQ_LEN)
def test_one_worker_goes_from_all_sequences_at_once_to_one_by_one(sequences, seq_len):
    counts = list(step_cuts(sequences, seq_len, 1))
    assert (counts[0], counts[-1]) == (1, sequences)
    assert all(sequences // count in SIZES for count in simulated_cuts(sequences, seq_len, 1))


@given(SEQUENCES, SEQ_LEN, st.integers(2, 8))
def test_several_workers_have_enough_of_them_or_as_many_as_there_can_be(sequences, seq_len, num_workers):
    first = next(simulated_cuts(sequences, seq_len, num_workers))
    busy = first >= PER_GPU * num_workers
    small = sequences // first * seq_len <= max(FULL_TOKENS, seq_len)
    assert (busy and small) or first == sequences
