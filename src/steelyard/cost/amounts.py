"""Numbers of one pipeline configuration, or arrays with those of several: what both need that arithmetic does not
give."""

from collections.abc import Callable, Hashable

import numpy as np

from steelyard.units import Amount


def at_each(amount: Amount, of: Callable[[float], float]) -> Amount:
    """What a function of one number makes of every number."""
    return np.array([of(each) for each in amount.tolist()]) if isinstance(amount, np.ndarray) else of(amount)


def hashable(amount: Amount) -> Hashable:
    """The same for equal numbers."""
    return amount.tobytes() if isinstance(amount, np.ndarray) else amount


def is_positive(amount: Amount) -> bool:
    """Whether the number is above 0, or one of them."""
    return bool(amount.max() > 0) if isinstance(amount, np.ndarray) else amount > 0
