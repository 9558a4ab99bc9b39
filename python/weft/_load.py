"""Runs as Python sees them: what the program ``weft`` says of a run, and its records as arrays.

The program alone reads traces. It writes their records as arrays that NumPy takes as they stand, and
answers in JSON; nothing here parses, aligns or computes anything of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import warnings
from functools import cached_property
from typing import TYPE_CHECKING, Any, Mapping, Optional, Union

from weft._program import program

if TYPE_CHECKING:
    import numpy

# Columns of this type are texts: places in strings.json.
_TEXT = "<u4"


class Error(Exception):
    """What the program ``weft`` refused or failed at, in its own words.

    ``exit_status`` is how it ended: 1 the input cannot be used, 2 the call makes no sense, 3 the
    machine did not do its part, below 0 a signal ended it.
    """

    exit_status: int

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class Run:
    """A run that was loaded: records as tables, and what weft finds and predicts for it.

    Times and bytes are the target cluster's wherever a lab scaled them, as in ``weft show``,
    ``diagnose`` and ``replay``; in all other runs they are what was recorded.
    """

    path: str
    """The run's folder or file."""

    tables: dict[str, dict[str, numpy.ndarray]]
    """Each table by its name, as a dict of columns that are equally long (docs/python.md).

    A kind of record that docs/trace_format.md names has a table of that name, sorted by time, all
    ranks on one clock: ``run.tables["wait"]["duration_ns"].sum()``. It is there when it is empty too.
    """

    remarks: list[str]
    """What was missing, inferred or left out when clocks were put on one, for people."""

    def __init__(
        self, path: str, tables: dict[str, dict[str, numpy.ndarray]], remarks: list[str]
    ) -> None:
        self.path = path
        self.tables = tables
        self.remarks = remarks

    def __repr__(self) -> str:
        processes = self.tables["processes"]
        records = int(processes["events"].sum())
        return f"<weft.Run {self.path!r}: {records} records of {len(processes['rank'])} ranks>"

    @cached_property
    def info(self) -> dict[str, Any]:
        """What ``weft info --json`` says: where and how the run was made, and what is damaged."""
        return _ask("info", self.path)

    @cached_property
    def diagnosis(self) -> dict[str, Any]:
        """What ``weft diagnose --json`` says (docs/diagnose.md): found when it is first asked for."""
        return _ask("diagnose", self.path)

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The diagnosis's findings, each with what it would gain to remove it; the largest first."""
        return self.diagnosis["findings"]

    def predict(
        self,
        set: Optional[Mapping[str, Any]] = None,
        plan: Union[str, os.PathLike[str], None] = None,
        as_lab: bool = False,
        output: Union[str, os.PathLike[str], None] = None,
    ) -> dict[str, Any]:
        """What ``weft replay --json`` says: the run under another plan, or on another cluster.

        ``set`` is another cluster, ``{"link": "10gbit", "hosts": 8}``; ``plan`` a plan's file or a
        preset, the recorded one if absent; ``as_lab`` asks what the run's lab would measure.
        ``output`` is a new folder for the predicted run, which ``weft.load`` loads as any other.
        """
        words = [f"--set={key}={value}" for key, value in (set or {}).items()]
        if plan is not None:
            words.append(f"--plan={os.fspath(plan)}")
        if as_lab:
            words.append("--as-lab")
        if output is not None:
            words.append(f"--output={os.fspath(output)}")
        return _ask("replay", self.path, *words)


def load(run: Union[str, os.PathLike[str]]) -> Run:
    """Loads a run: its folder, or one trace file of it.

    Raises ``weft.Error`` where the program ``weft`` refuses the run. Where it can use a part of it
    only, because a file is damaged, the part is loaded, and the program's words are a warning.
    """
    try:
        import numpy
    except ImportError as missing:
        raise ImportError("weft.load needs NumPy: pip install numpy") from missing
    path = os.path.abspath(os.fspath(run))
    with tempfile.TemporaryDirectory(prefix="weft-load-") as folder:
        exported = _ask("export", path, "--to=npy", "--target-time", f"--output={folder}")
        with open(os.path.join(folder, "strings.json"), encoding="utf-8") as file:
            texts = numpy.array(json.load(file), dtype=object)
        tables = {}
        for name in exported["rows"]:
            rows = numpy.load(os.path.join(folder, f"{name}.npy"), allow_pickle=False)
            tables[name] = _columns(rows, texts)
    return Run(path, tables, exported["remarks"])


def _columns(rows: numpy.ndarray, texts: numpy.ndarray) -> dict[str, numpy.ndarray]:
    columns = {}
    for name in rows.dtype.names:
        column = rows[name]
        columns[name] = texts[column] if column.dtype.str == _TEXT else column.copy()
    return columns


def _ask(verb: str, run: str, *words: str) -> dict[str, Any]:
    """The answer of a verb of the program; other words of it are warnings, or the error."""
    try:
        done = subprocess.run(
            [program(), verb, run, *words, "--json"],
            stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace",
        )
    except OSError as failure:
        raise Error(f"the program weft cannot be started ({failure}): install weft again") from failure
    said = done.stderr.splitlines()
    if done.returncode != 0:
        ended = f"weft {verb}: ended by signal {-done.returncode}, without a word"
        raise Error(said[-1] if said else ended, done.returncode)
    for line in said:
        warnings.warn(line, stacklevel=3)
    return json.loads(done.stdout)
