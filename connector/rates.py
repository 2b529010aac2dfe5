"""Whether loading a hit is predicted to beat computing it, from rates measured in this engine."""

from __future__ import annotations

from typing import Final

DECAY: Final = 0.9
"""Weight of what was measured before, at each measurement: the last ten or so count."""

LOAD_SETUP_S: Final = 0.002
"""What a load takes that has nothing to do with its size."""

TRY_AGAIN: Final = 16
"""So many hits are declined before one is loaded all the same, to see whether loading has become faster."""


class Rate:
    """Amounts per second, recent ones weighing more, large ones more than small ones."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        if amount > 0 and seconds > 0:
            self._amount = DECAY * self._amount + amount
            self._seconds = DECAY * self._seconds + seconds

    @property
    def per_second(self) -> float:
        """0 when nothing was measured."""
        return self._amount / self._seconds if self._seconds else 0.0


class Prediction:
    """Rates of loading (bytes) and computing (tokens). As long as one is not known, loading is worth trying."""

    def __init__(self) -> None:
        self.loading = Rate()
        self.computing = Rate()
        self.declined = 0
        self._in_a_row = 0

    def worth_loading(self, tokens: int, size: int) -> bool:
        load, compute = self.loading.per_second, self.computing.per_second
        if not load or not compute or LOAD_SETUP_S + size / load <= tokens / compute or self._in_a_row >= TRY_AGAIN:
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        self.declined += 1
        return False
