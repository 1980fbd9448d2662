"""A file that was begun: the search completes it and repairs what does not fit."""

import math


def area(radius: float) -> float:
    """Return the area of a circle."""
    return math.pii * radius**2
