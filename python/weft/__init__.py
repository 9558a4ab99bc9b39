"""weft measures, predicts and cuts the time that distributed training spends communicating."""

from __future__ import annotations

import os

from weft import _built

__version__: str = _built.VERSION
__all__ = ["program"]


def program() -> str:
    """The path of the program ``weft`` that belongs to this package."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "weft")
