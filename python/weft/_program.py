"""Where the program ``weft`` is."""

from __future__ import annotations

import os


def program() -> str:
    """The path of the program ``weft`` that belongs to this package."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "weft")
