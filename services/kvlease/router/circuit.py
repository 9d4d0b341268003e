"""A circuit breaker: after calls that timed out, none is made for a while."""

from __future__ import annotations

from collections.abc import Callable


class Circuit:
    """Opens after ``threshold`` failures in a row and stays open for ``pause_s``; then
    one call is let through, and its result decides. ``clock`` is monotonic, in seconds.

    So a service that hangs costs its deadline a few times, not once a turn.
    """

    def __init__(self, clock: Callable[[], float], *, threshold: int, pause_s: float) -> None:
        self._clock = clock
        self._threshold = threshold
        self._pause_s = pause_s
        self._failures = 0
        self._closed_again_at = 0.0

    def allows(self) -> bool:
        """Whether a call may be made now. True must be followed by :meth:`succeeded` or
        :meth:`failed`."""
        if self._failures < self._threshold:
            return True
        now = self._clock()
        if now < self._closed_again_at:
            return False
        self._closed_again_at = now + self._pause_s  # one trial at a time
        return True

    def succeeded(self) -> None:
        """The call was answered, whatever the answer."""
        self._failures = 0

    def failed(self) -> None:
        """The call was not answered in time."""
        self._failures += 1
        if self._failures >= self._threshold:
            self._closed_again_at = self._clock() + self._pause_s
