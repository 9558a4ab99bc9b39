"""Who is in the job, and the sets of ranks that work together."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import socket
import warnings
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Union

import torch
import torch.distributed as dist

from weft.torch import _C
from weft.torch.horovod._agree import Agreement, HorovodInternalError, Limits, Operation, Request

_NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
# Of a call that other ranks lack; as long as torch's own groups wait.
_FAIL_AFTER = dist.default_pg_timeout.total_seconds()
_WARN_AFTER = 60.0
# What a program that ends gives its last operations, and the other ranks to say goodbye.
_PATIENCE = datetime.timedelta(seconds=5)


class Member(NamedTuple):
    """What a rank is told of itself, and where it is."""

    local_rank: int
    local_size: int
    host: str


class World:
    """What init() makes and shutdown() ends."""

    def __init__(self, owned: bool):
        self.owned = owned  # torch's default group is ours
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.process = os.getpid()
        self.parts: Dict[int, "Part"] = {}
        self.next_part = 1
        self.exchanging: Any = None  # a reference to the optimizer whose gradients are exchanged
        self.local_rank = self.local_size = self.cross_rank = self.cross_size = 0


class Part:
    """The ranks of one process set, with the groups of torch that serve them."""

    def __init__(self, ranks: Sequence[int]):
        world = current()
        limits = _limits()
        timeout = datetime.timedelta(seconds=limits.fail)
        self.ranks = list(ranks)
        # Rounds do not wait for what they start, nor the program's own use of torch for either.
        self.group = dist.new_group(self.ranks, timeout=timeout, backend="weft")
        talk = dist.new_group(self.ranks, timeout=timeout, backend="weft")
        self._groups = [self.group, talk]
        self.rank: Optional[int] = None
        self.agreement: Optional[Agreement] = None
        if world.rank in self.ranks:
            self.rank = self.ranks.index(world.rank)
            self.talk = talk
            self.agreement = Agreement(self.ranks, self.rank, talk, self._of_a_joined_rank, limits)

    def _of_a_joined_rank(self, request: Request) -> Operation:
        from weft.torch.horovod._calls import zeros_for

        return zeros_for(request, self)

    def close(self, patience: float = _PATIENCE.total_seconds()) -> bool:
        return self.agreement is None or self.agreement.close(patience)

    def drop(self) -> None:
        if self.agreement is not None:
            for group in self._groups:
                dist.destroy_process_group(group)


_world: Optional[World] = None
_store: Any = None  # kept: its port is the same when the job is initialized again


def current() -> World:
    if _world is None or _world.process != os.getpid():
        raise ValueError(_NOT_INITIALIZED)
    return _world


def part_of(process_set: "ProcessSet") -> Part:
    """The part that serves `process_set`, of which this rank must be."""
    world = current()
    number = process_set.process_set_id
    if number is None or number not in world.parts:
        raise ValueError("Process set does not exist or has not been registered.")
    part = world.parts[number]
    if part.agreement is None:
        raise ValueError(
            f"Process is not part of provided process set: rank {world.rank} is not among "
            f"{part.ranks}."
        )
    return part


def whole_backend() -> Any:
    """weft's own view of the group that is the job, which has the exchange of gradients."""
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if _C.is_weft(backend):
        return backend
    return current().parts[0].group._get_backend(torch.device("cpu"))


def take_part() -> None:
    """This rank has joined, and the others exchange gradients."""
    optimizer = current().exchanging()
    optimizer._take_part()


# ---- coming and going ----------------------------------------------------------------------


def init(*args: Any, **kwargs: Any) -> None:
    """Joins the job that the launcher started: ``weft run``, torchrun, mpirun, srun, ...

    Without a launcher it is a job of one rank. A second call does nothing. Takes Horovod's
    ``process_sets``: sets of ranks to begin with; its ``comm`` can only be left out.
    """
    _init(*args, **kwargs)


def _init(
    comm: Optional[Sequence[int]] = None,
    process_sets: Union[None, str, Sequence["ProcessSet"]] = None,
) -> None:
    global _world
    if comm is not None and (not isinstance(comm, (list, tuple)) or len(comm) > 0):
        raise NotImplementedError(
            "hvd.init(comm=...): weft takes all ranks that the launcher started; use process sets "
            "(hvd.add_process_set) for some of them"
        )
    if is_initialized():
        return
    owned = not dist.is_initialized()
    place = _meet() if owned else {}
    try:
        _world = World(owned)
        _find_places(_world, place)
        _world.parts[0] = Part(range(_world.size))
        global_process_set.process_set_id = 0
        global_process_set.ranks = list(range(_world.size))
        if not isinstance(process_sets, str):
            for one in process_sets or []:
                add_process_set(one)
    except BaseException:
        _end(_PATIENCE.total_seconds())
        raise
    if os.environ.get("HOROVOD_TIMELINE") not in (None, "", "DYNAMIC"):
        _no_timeline("HOROVOD_TIMELINE")


def _meet() -> Dict[str, Any]:
    """Makes torch's default group of all ranks, over weft; returns what the launcher said."""
    global _store
    torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    timeout = datetime.timedelta(seconds=max(_limits().fail, _FAIL_AFTER))
    if torchrun and "WEFT_RANK" not in os.environ and "WEFT_SIZE" not in os.environ:
        dist.init_process_group("weft", timeout=timeout)
        return {}
    place = _C.launched()
    if place is None:
        dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
        return {}
    if _store is None:
        _store = _open_store(place["rendezvous"], place["rank"], place["size"])
    with _secret(place["secret"]):
        dist.init_process_group(
            "weft",
            timeout=timeout,
            store=_store,
            rank=place["rank"],
            world_size=place["size"],
        )
    return place


def _open_store(rendezvous: str, rank: int, size: int) -> Any:
    if rendezvous.startswith("file:"):
        return dist.FileStore(rendezvous[len("file:") :] + ".torch", size)
    host, port = rendezvous.rsplit(":", 1)
    return dist.TCPStore(host.strip("[]"), int(port), size, rank == 0)


@contextlib.contextmanager
def _secret(secret: str) -> Iterator[None]:
    """All ranks have the job's secret, so that it need not go through the store."""
    given = "WEFT_SECRET" in os.environ
    if not given:
        os.environ["WEFT_SECRET"] = secret
    try:
        yield
    finally:
        if not given:
            del os.environ["WEFT_SECRET"]


def _find_places(world: World, place: Dict[str, Any]) -> None:
    """Which ranks are on which host: from the launcher, or from the hosts' names."""
    local = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not place and all(word.isdigit() for word in local):
        place = {"local_rank": int(local[0]), "local_size": int(local[1])}
    own = Member(place.get("local_rank", 0), place.get("local_size", 0), _host())
    said: List[Any] = [None] * world.size
    dist.all_gather_object(said, tuple(own))
    members = [Member(*one) for one in said]
    if any(member.local_size == 0 for member in members):
        hosts = [member.host for member in members]
        members = [
            Member(hosts[:rank].count(host), hosts.count(host), host)
            for rank, host in enumerate(hosts)
        ]
    world.local_rank = members[world.rank].local_rank
    world.local_size = members[world.rank].local_size
    alike = [rank for rank, one in enumerate(members) if one.local_rank == world.local_rank]
    world.cross_rank = alike.index(world.rank)
    world.cross_size = len(alike)


def _host() -> str:
    return os.environ.get("WEFT_HOST") or socket.gethostname()


def shutdown(*args: Any, **kwargs: Any) -> None:
    """Leaves the job, when the other ranks do; init() may be called again."""
    if _world is not None and _world.process == os.getpid():
        _end(_PATIENCE.total_seconds())


def _end(patience: float) -> None:
    global _world
    world, _world = _world, None
    if world is None:
        return
    parts = list(world.parts.values())
    stopped = [part.close(patience if part is parts[0] else 0.1) for part in parts]
    global_process_set.ranks = []
    if not dist.is_initialized():
        return
    if world.owned:
        dist.destroy_process_group()
    elif all(stopped):
        for part in parts:
            part.drop()


def _at_exit() -> None:
    """No thread may be at work in Python when it ends."""
    if _world is None or _world.process != os.getpid():
        return
    parts = list(_world.parts.values())
    if not all([part.close(0.05) for part in parts]):
        # It waits for other ranks, in vain: they cannot be told by it any more.
        _C.close_all(_PATIENCE)
        for part in parts:
            part.close(_PATIENCE.total_seconds())


atexit.register(_at_exit)


def is_initialized() -> bool:
    """Whether init() was called, and shutdown() not since."""
    return _world is not None and _world.process == os.getpid()


def rank() -> int:
    """This process's number in the job."""
    return current().rank


def size() -> int:
    """How many ranks the job has."""
    return current().size


def local_rank() -> int:
    """This process's number among those of its host."""
    return current().local_rank


def local_size() -> int:
    """How many ranks are on this host."""
    return current().local_size


def cross_rank() -> int:
    """This host's number among those that have a rank of this local rank."""
    return current().cross_rank


def cross_size() -> int:
    """How many hosts have a rank of this local rank."""
    return current().cross_size


# ---- process sets --------------------------------------------------------------------------


class ProcessSet:
    """Some of the ranks, which may work together without the others."""

    process_set_id: Optional[int] = None
    ranks: Optional[List[int]] = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: Sequence[int]):
        if not isinstance(ranks_or_comm, (list, tuple, range, set, frozenset)):
            raise ValueError(
                "ProcessSet takes a list of ranks; communicators of MPI are unknown to weft"
            )
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(one, int) for one in ranks):
            raise ValueError(f"ProcessSet takes a list of ranks, which are numbers, not {ranks}")
        self.ranks = ranks

    def size(self) -> Optional[int]:
        """How many ranks it has; None before it is added."""
        return len(self._part().ranks) if self.process_set_id is not None else None

    def rank(self) -> Optional[int]:
        """This process's number in it; None before it is added."""
        if self.process_set_id is None:
            return None
        own = self._part().rank
        if own is None:
            raise ValueError("Process is not part of provided process set.")
        return own

    def included(self) -> Optional[bool]:
        """Whether this process is of it."""
        return None if self.ranks is None else current().rank in self.ranks

    def _part(self) -> Part:
        part = current().parts.get(self.process_set_id or 0)
        if part is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return part

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    # Stands for all ranks in signatures, too.
    def __repr__(self) -> str:
        return "global_process_set" if self is global_process_set else str(self)


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def add_process_set(process_set: Union[ProcessSet, Sequence[int]]) -> ProcessSet:
    """Registers a set of ranks; all ranks of the job call it alike, and wait for each other."""
    from weft.torch.horovod._calls import agree_on

    world = current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= world.size:
        raise ValueError(f"{added}: expected different ranks below {world.size}, one at least")
    if any(part.ranks == ranks for part in world.parts.values()):
        raise ValueError(f"Attempted to add a duplicate process set: {added}")
    agree_on(f"add_process_set {ranks}")
    number, world.next_part = world.next_part, world.next_part + 1
    world.parts[number] = Part(ranks)
    added.process_set_id = number
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Unregisters a set; all ranks of the job call it alike. False if there is no such set."""
    from weft.torch.horovod._calls import agree_on

    world = current()
    number = process_set.process_set_id
    if number is None or number == 0 or number not in world.parts:
        return False
    agree_on(f"remove_process_set {process_set.ranks}")
    process_set.process_set_id = None
    part = world.parts.pop(number)
    if not part.close():
        raise HorovodInternalError(f"operations of process set {part.ranks} have not ended")
    part.drop()
    return True


# ---- what it was built with ----------------------------------------------------------------


def mpi_threads_supported() -> bool:
    """Raises ValueError, as Horovod does where it runs without MPI."""
    raise ValueError("Horovod MPI is not enabled: this is weft, which does not use MPI.")


def mpi_enabled() -> bool:
    """False: MPI is not used, whoever launches the program."""
    return False


def mpi_built() -> bool:
    """False: MPI is not used."""
    return False


def gloo_enabled() -> bool:
    """False: weft takes the place of Gloo."""
    return False


def gloo_built() -> bool:
    """False: weft takes the place of Gloo."""
    return False


def nccl_built() -> int:
    """0: NCCL is not used."""
    return 0


def ddl_built() -> bool:
    """False: DDL is not used."""
    return False


def ccl_built() -> bool:
    """False: oneCCL is not used."""
    return False


def cuda_built() -> bool:
    """False: tensors are exchanged in the processor's memory."""
    return False


def rocm_built() -> bool:
    """False: tensors are exchanged in the processor's memory."""
    return False


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: Any) -> None:
    """Raises ImportError unless `ext_name` is Horovod for torch: weft serves no other."""
    if ext_name not in ("horovod.torch", "weft.torch", "weft.torch.horovod"):
        raise ImportError(f"Extension {ext_name} is not there: weft serves torch only.")


# ---- timelines -----------------------------------------------------------------------------


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Warns that no timeline is written: weft records with ``WEFT_TRACE``."""
    current()
    _no_timeline(f"hvd.start_timeline({file_path!r})")


def stop_timeline() -> None:
    """Does nothing: there is no timeline."""
    current()


def _no_timeline(what: str) -> None:
    folder = os.environ.get("WEFT_TRACE")
    instead = (
        f"this run is recorded in {folder} (WEFT_TRACE)"
        if folder
        else "set WEFT_TRACE=FOLDER before the program starts"
    )
    warnings.warn(
        f"{what}: weft writes no Horovod timeline; {instead}, and `weft show` and `weft export` "
        "show what was on the wire",
        UserWarning,
        stacklevel=3,
    )


def _limits() -> Limits:
    def seconds(name: str, otherwise: float) -> float:
        text = os.environ.get(name, "")
        try:
            value = float(text) if text else 0.0
        except ValueError:
            raise ValueError(f"{name} is \"{text}\": expected a number of seconds") from None
        return value if value > 0 else otherwise

    fail = seconds("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _FAIL_AFTER)
    warn = min(seconds("HOROVOD_STALL_CHECK_TIME_SECONDS", _WARN_AFTER), fail)
    if os.environ.get("HOROVOD_STALL_CHECK_DISABLE", "") not in ("", "0"):
        warn = fail
    return Limits(warn, fail)
