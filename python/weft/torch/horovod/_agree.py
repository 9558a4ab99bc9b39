"""How ranks agree on what to do next: operations are matched by name, whatever their order.

A program may call operations in another order on each rank, as far as they are asynchronous, and
may get their shapes wrong. Process groups know neither. So each set of ranks has a thread that
tells the other ranks what was called here, in rounds:

    call ──► Agreement.submit ──round: who called what──► by all? ──► Operation.run ──► wait
                                                          alike? (else an error everywhere)

A round is one all-gather, and all ranks know the same after it; hence they find the same operations
complete, in the same order, and start them in it. A rank takes part in a round when something was
called that is not started yet; otherwise the others wait for it, and nothing moves.

Ranks that joined (``hvd.join``) call nothing more, and take part with zeros until all have joined.

Threads: any, for submit and close; the rest is the thread's own.
"""

from __future__ import annotations

import datetime
import json
import threading
import time
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

import torch
import torch.distributed as dist


class HorovodInternalError(RuntimeError):
    """A collective operation failed; what it says is the cause."""


class Request(NamedTuple):
    """What the ranks must agree on before an operation starts."""

    kind: str
    name: str
    dtypes: List[str] = []
    shapes: List[List[int]] = []
    op: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: List[int] = []


Calls = Dict[int, Request]  # by rank in the set


class Operation:
    """One call on this rank. `run` starts its works, knowing what all ranks asked for."""

    def __init__(self, request: Request, run: Callable[["Operation", List[Request]], None]):
        self.request = request
        self.run = run
        self.started = threading.Event()
        self.works: List[Any] = []
        self.finish: Callable[[], Any] = lambda: None
        self.failure: Optional[BaseException] = None

    def start(self, calls: List[Request]) -> None:
        try:
            self.run(self, calls)
        except Exception as failure:  # the caller's, who waits for it
            self.failure = failure
        self.run = _nothing
        self.started.set()

    def fail(self, failure: BaseException) -> None:
        self.failure = failure
        self.run = _nothing
        self.started.set()

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self.started.is_set() and all(work.is_completed() for work in self.works)


def _nothing(_operation: Operation, _calls: List[Request]) -> None:
    pass


class Limits(NamedTuple):
    """Seconds after which a call that others lack is warned of, and after which it fails."""

    warn: float
    fail: float


# What a rank says in a round without a second one: two small requests, or twenty names.
_SLOT = 1024
_LENGTH = 8
# Rounds that brought nothing follow each other more and more slowly.
_PAUSE_LEAST, _PAUSE_MOST = 0.0005, 0.01

JOIN = "join"
# What a rank that joined can take part in: its zeros change nothing.
_WITH_JOINED = ("allreduce", "barrier", "gradients")
_OPS_WITH_JOINED = (0, 1)  # Average, Sum


class Agreement:
    """Starts what all ranks of a set have called. All of them make theirs at the same time."""

    def __init__(
        self,
        ranks: Sequence[int],
        own: int,
        group: Any,
        fill_in: Callable[[Request], Operation],
        limits: Limits,
    ):
        self.ranks = list(ranks)
        self.own = own
        self._group = group
        self._fill_in = fill_in
        self._limits = limits
        self._changed = threading.Condition()
        self._new: List[Operation] = []
        self._mine: Dict[str, Operation] = {}  # called here, and not started
        self._awaited: List[Operation] = []  # by threads of the program
        self._closing = False
        self._failure: Optional[BaseException] = None
        self._numbers: Dict[str, int] = {}
        # What follows is the thread's, and the same on all ranks but for the clocks.
        self._called: Dict[str, Calls] = {}
        self._joined: List[int] = []
        self._last_joined = -1
        self._moved = time.monotonic()
        self._warned = False
        self._all_wait = False  # in the last round
        self._thread = threading.Thread(target=self._loop, name="weft-horovod", daemon=True)
        self._thread.start()

    # ---- callers -------------------------------------------------------------------------

    def name_for(self, kind: str) -> str:
        """The name of a call that was given none: the n-th of its kind."""
        with self._changed:
            number = self._numbers.get(kind, 0)
            self._numbers[kind] = number + 1
        return f"{kind}.noname.{number}"

    def submit(self, operation: Operation) -> None:
        with self._changed:
            if self._failure is not None:
                raise HorovodInternalError(str(self._failure)) from self._failure
            if self._closing:
                raise HorovodInternalError("Horovod has been shut down")
            name = operation.request.name
            if name in self._mine:
                raise HorovodInternalError(
                    f"{operation.request.kind} '{name}' was called while another operation of that "
                    "name is pending: give each its own name, or synchronize the first"
                )
            self._mine[name] = operation
            self._new.append(operation)
            self._changed.notify_all()

    def wait_until_started(self, operation: Operation) -> None:
        if operation.started.is_set():
            return
        with self._changed:
            self._awaited.append(operation)
        try:
            operation.started.wait()
        finally:
            with self._changed:
                self._awaited.remove(operation)

    def close(self, patience: float) -> bool:
        """Fails what was not started; whether the thread ended within so many seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(patience)
        return not self._thread.is_alive()

    # ---- the thread ----------------------------------------------------------------------

    def _loop(self) -> None:
        pause = 0.0
        try:
            while self._await_calls(pause):
                pause = 0.0 if self._round() else min(max(2 * pause, _PAUSE_LEAST), _PAUSE_MOST)
            failure: BaseException = HorovodInternalError("Horovod has been shut down")
        except BaseException as reason:
            failure = reason
        with self._changed:
            self._failure = failure
            left = list(self._mine.values())
            self._mine.clear()
            self._new.clear()
        for operation in left:
            operation.fail(failure)

    def _await_calls(self, pause: float) -> bool:
        """Waits for a call, or for `pause` seconds if some are pending; False: it is closed."""
        with self._changed:
            if pause and self._mine and not self._new and not self._closing:
                self._changed.wait(pause)
            while not self._mine and not self._closing:
                self._changed.wait()
            return not self._closing

    def _round(self) -> bool:
        """Whether it brought anything."""
        with self._changed:
            new, self._new = self._new, []
            waits = any(not operation.started.is_set() for operation in self._awaited)
        verdict = self._verdict()
        said = self._exchange([[one.request for one in new], waits, verdict])
        moved = False
        for rank, (requests, _waits, _verdict) in enumerate(said):
            for words in requests:
                moved = True
                self._note(rank, Request(*words))
        moved = self._start_complete() or moved
        if moved:
            self._moved, self._warned = time.monotonic(), False
        elif said[0][2]:
            self._give_up(said[0][2])
        self._all_wait = all(waits for _requests, waits, _verdict in said)
        return moved

    def _note(self, rank: int, request: Request) -> None:
        if request.kind == JOIN:
            self._joined.append(rank)
            self._last_joined = rank
        self._called.setdefault(request.name, {})[rank] = request

    def _start_complete(self) -> bool:
        complete = [name for name, calls in self._called.items() if self._is_complete(calls)]
        for name in complete:
            calls = self._called.pop(name)
            if next(iter(calls.values())).kind == JOIN:
                self._end_join()  # before anyone calls more
            self._start(name, calls)
        return bool(complete)

    def _end_join(self) -> None:
        self._joined = []
        # Those that had less to do have given fewer names.
        with self._changed:
            self._numbers.clear()

    def _is_complete(self, calls: Calls) -> bool:
        if any(request.kind == JOIN for request in calls.values()):
            return len(calls) == len(self.ranks)
        return all(rank in calls or rank in self._joined for rank in range(len(self.ranks)))

    def _start(self, name: str, calls: Calls) -> None:
        with self._changed:
            operation = self._mine.pop(name, None)
        wrong = self._difference(calls)
        if operation is None:
            if wrong is None:
                operation = self._fill_in(next(iter(calls.values())))
            else:
                return
        if wrong is not None:
            operation.fail(HorovodInternalError(wrong))
            return
        some = next(iter(calls.values()))
        if some.kind == JOIN:
            some = some._replace(root=self.ranks[self._last_joined])
            calls = {rank: some for rank in calls}
        operation.start([calls.get(rank, some) for rank in range(len(self.ranks))])

    # ---- what is wrong -------------------------------------------------------------------

    def _difference(self, calls: Calls) -> Optional[str]:
        """Why these calls of one name are not one operation, or None."""
        first, one = next(iter(calls.items()))
        title = f"{one.kind} '{one.name}': "
        if len(calls) < len(self.ranks):
            if one.kind not in _WITH_JOINED:
                return title + "a rank has joined (hvd.join), and only allreduce goes on then"
            if one.kind == "allreduce" and one.op not in _OPS_WITH_JOINED:
                return title + "a rank has joined (hvd.join), and only sums and averages go on then"
        for rank, other in calls.items():
            for what, ours, theirs in _compared(one, other):
                if ours != theirs:
                    return (
                        f"{title}ranks differ in {what}: {ours} on rank {self.ranks[first]}, "
                        f"{theirs} on rank {self.ranks[rank]}"
                    )
        return None

    def _verdict(self) -> Optional[str]:
        """The first rank decides when a call that others lack fails: all must do so together."""
        if self.own != 0 or not self._called:
            return None
        seconds = time.monotonic() - self._moved
        hopeless = self._all_wait and seconds > self._limits.warn
        if hopeless or seconds > self._limits.fail:
            return (
                f"no operation was called by all ranks for {seconds:.0f} s"
                + (", and all of them wait" if hopeless else "")
                + f": {self._who_called_what()}. Operations are matched by name; calls without a "
                "name are numbered by kind"
            )
        if seconds > self._limits.warn and not self._warned:
            self._warned = True
            warnings.warn(
                f"weft.torch.horovod: nothing moved for {seconds:.0f} s: {self._who_called_what()}",
                RuntimeWarning,
            )
        return None

    def _who_called_what(self) -> str:
        lines = []
        for name, calls in list(self._called.items())[:8]:
            lacking = [
                rank
                for number, rank in enumerate(self.ranks)
                if number not in calls and number not in self._joined
            ]
            there = _ranks([self.ranks[number] for number in calls])
            kind = next(iter(calls.values())).kind
            lines.append(f"{kind} '{name}' was called by {there} and not by {_ranks(lacking)}")
        more = len(self._called) - len(lines)
        return "; ".join(lines) + (f"; and {more} more" if more else "")

    def _give_up(self, why: str) -> None:
        self._called.clear()
        self._joined = []
        self._moved, self._warned = time.monotonic(), False
        with self._changed:
            new = {id(operation) for operation in self._new}
            left = [one for one in self._mine.values() if id(one) not in new]
            for operation in left:
                del self._mine[operation.request.name]
        for operation in left:
            operation.fail(HorovodInternalError(why))

    # ---- the wire ------------------------------------------------------------------------

    def _exchange(self, words: Any) -> List[Any]:
        """What each rank said, in the order of ranks."""
        text = json.dumps(words).encode()
        count = len(self.ranks)
        line = len(text).to_bytes(_LENGTH, "little") + text[: _SLOT - _LENGTH]
        line += bytes(_SLOT - len(line))
        lines = torch.empty(count * _SLOT, dtype=torch.uint8)
        self._wait(
            dist.all_gather_into_tensor(lines, _tensor_of(line), self._group, async_op=True)
        )
        heads = [bytes(one.numpy()) for one in lines.view(count, _SLOT)]
        sizes = [int.from_bytes(one[:_LENGTH], "little") for one in heads]
        rests = [max(0, size - (_SLOT - _LENGTH)) for size in sizes]
        tails = [b""] * count
        if any(rests):
            flat = torch.empty(sum(rests), dtype=torch.uint8)
            own = _tensor_of(text[_SLOT - _LENGTH :])
            parts = list(flat.split(rests))
            self._wait(dist.all_gather(parts, own, self._group, async_op=True))
            tails = [bytes(part.numpy()) for part in parts]
        return [
            json.loads(head[_LENGTH : _LENGTH + size] + tail)
            for head, size, tail in zip(heads, sizes, tails)
        ]

    def _wait(self, work: Any) -> None:
        """Waits for the other ranks to take part, and warns if they do not."""
        limit = datetime.timedelta(seconds=self._limits.warn)
        while True:
            try:
                work.wait(limit)
                return
            except dist.DistBackendError:
                if work.is_completed():
                    work.wait()  # raises it if it was not only late
                    return
            with self._changed:
                pending = ", ".join(f"'{name}'" for name in list(self._mine)[:8])
            warnings.warn(
                f"weft.torch.horovod: rank {self.ranks[self.own]} has waited for "
                f"{self._limits.warn:.0f} s for other ranks that call nothing; it has called "
                f"{pending}",
                RuntimeWarning,
            )


def _tensor_of(words: bytes) -> torch.Tensor:
    """With memory of its own: what lets go of it in the end must not need Python."""
    if not words:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(words), dtype=torch.uint8).clone()


def _ranks(ranks: List[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_KINDS_OF_ONE_SHAPE = ("allreduce", "broadcast", "reducescatter")
# Of these the first dimension may differ.
_KINDS_OF_ROWS = ("allgather", "alltoall")


def _compared(one: Request, other: Request) -> List[Any]:
    """What must be equal in two calls, as (what, one's, other's)."""
    out: List[Any] = [("the kind of operation", one.kind, other.kind)]
    if one.kind != other.kind:
        return out
    out.append(("type", _listed(one.dtypes), _listed(other.dtypes)))
    if one.kind in _KINDS_OF_ONE_SHAPE:
        out.append(("shape", _listed(one.shapes), _listed(other.shapes)))
    if one.kind in _KINDS_OF_ROWS:
        rows = [_listed([["*", *s[1:]] for s in request.shapes]) for request in (one, other)]
        out.append(("shape beyond the first dimension", *rows))
    out.append(("what is done (op)", one.op, other.op))
    out.append(("prescale_factor", one.prescale, other.prescale))
    out.append(("postscale_factor", one.postscale, other.postscale))
    if one.kind == "broadcast":
        out.append(("root_rank", one.root, other.root))
    return out


def _listed(words: List[Any]) -> str:
    shown = [str(word).replace("'", "") for word in words]
    return shown[0] if len(shown) == 1 else "[" + ", ".join(shown) + "]"
