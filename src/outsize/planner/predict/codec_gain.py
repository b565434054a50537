"""Whether a codec on the link is worth what it takes."""

# Of a step that a codec must save: predictions of two plans of one model on one machine differ by less.
GAIN = 0.03


def worth_it(former_s: float, step_s: float) -> bool:
    """Return whether steps of ``step_s`` are enough shorter than those of ``former_s``, seconds, to add a codec."""
    return step_s < former_s * (1 - GAIN)
