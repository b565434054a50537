"""Loss scaling for fp16, whose gradients underflow: the dynamic scheme of `torch.amp.GradScaler`."""

INITIAL = 2.0**16
GROWTH = 2.0
BACKOFF = 0.5
GROWTH_INTERVAL = 2000


class LossScale:
    """What losses are multiplied by: doubled after `GROWTH_INTERVAL` good steps, halved after a bad one.

    The factors are powers of two, so scaling and unscaling lose no bit.

    Attributes:
        enabled: False keeps the scale at one.
        value: the current scale.
    """

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.value = INITIAL if enabled else 1.0
        self._good = 0

    def update(self, skipped: bool) -> None:
        """Take note of one step."""
        if not self.enabled:
            return
        self._good = 0 if skipped else self._good + 1
        if skipped:
            self.value *= BACKOFF
        elif self._good == GROWTH_INTERVAL:
            self.value *= GROWTH
            self._good = 0

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value, "good": self._good}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from a checkpoint."""
        if self.enabled:
            self.value, self._good = state["value"], int(state["good"])
