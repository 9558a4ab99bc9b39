"""weft measures, predicts and cuts the time that distributed training spends communicating.

A run that was recorded (``weft run``, ``WEFT_TRACE``) is loaded with::

    run = weft.load("run7")
    run.tables["wait"]["duration_ns"].sum()     # records as NumPy arrays
    run.findings[0]["title"]                    # what costs the most time
    run.predict(set={"link": "10gbit"})         # what another cluster would take

``weft.torch`` is the backend for PyTorch; nothing here needs it.
"""

from __future__ import annotations

from weft import _built
from weft._load import Error, Run, load
from weft._program import program

__version__: str = _built.VERSION
__all__ = ["Error", "Run", "load", "program"]
