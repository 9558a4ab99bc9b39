"""weft as a backend of ``torch.distributed``.

Change one word::

    torch.distributed.init_process_group("weft")

and everything that torch does with process groups on CPU tensors (DDP, FSDP2, ZeRO, DTensor,
pipelines, checkpoints) travels over weft. Importing this module registers the backend; from torch
2.15 on not even that is needed, because torch finds it by its entry point.

The plan, the trace and the network are chosen by weft's variables (``WEFT_PLAN``, ``WEFT_TRACE``,
``WEFT_INTERFACE``, ...), as for any program of weft; docs/torch.md tells the rest.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
from typing import Any, Optional

from weft import _built

try:
    import torch
    import torch.distributed as _dist
except ImportError as _missing:
    raise ImportError(
        "weft.torch needs torch: install torch 2.4 or later, then install weft again"
    ) from _missing


def _explain(reason: str) -> str:
    if not _built.TORCH:
        return (
            "weft was installed without torch, so weft.torch is not there: install weft again "
            "(pip install --force-reinstall --no-deps, from its sources)"
        )
    if _built.TORCH != torch.__version__:
        return (
            f"weft.torch was built for torch {_built.TORCH}, and this is torch "
            f"{torch.__version__}: install weft again "
            "(pip install --force-reinstall --no-deps, from its sources)"
        )
    return f"weft.torch cannot be loaded: {reason}"


# A library that was compiled against another torch may load, and crash later.
if _built.TORCH != torch.__version__:
    raise ImportError(_explain(""))
try:
    from weft.torch import _C
except ImportError as _failure:
    raise ImportError(_explain(str(_failure))) from _failure

from weft.torch import _model  # noqa: E402
from weft.torch._attach import Attachment, attach, detach, synchronize  # noqa: E402
from weft.torch._record import Recording, record, record_every_ddp, stop_all  # noqa: E402

__all__ = [
    "Attachment",
    "Recording",
    "attach",
    "culprit",
    "detach",
    "failure",
    "record",
    "status",
    "synchronize",
]

# Tensors on anything but the processor are copied through its memory (src/staging.h).
_DEVICES = ["cpu", "cuda", "privateuseone"]
# What a program that ends without destroy_process_group() gives the others to say goodbye.
_PATIENCE = datetime.timedelta(seconds=5)


def _create(options: Any, _backend_options: Any) -> Any:
    return _C.create(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        list(options.global_ranks_in_group),
    )


def _register() -> None:
    """Registers the backend; torch calls it when it finds the entry point."""
    if not hasattr(_dist.Backend, "WEFT"):
        _dist.Backend.register_backend("weft", _create, extended_api=True, devices=_DEVICES)


def _backend(group: Optional[Any]) -> Any:
    group = group if group is not None else _dist.group.WORLD
    if group is None:
        raise ValueError("there is no process group: call init_process_group first")
    backend = _model.backend_of(group)
    if backend is None:
        raise TypeError("this is not a process group of weft")
    return backend


def status(group: Optional["_dist.ProcessGroup"] = None) -> dict:
    """What the job of ``group`` is doing: operations in flight, lanes, who waits for whom."""
    words = _C.status(_backend(group))
    return json.loads(words) if words else {}


def failure(group: Optional["_dist.ProcessGroup"] = None) -> Optional[str]:
    """Why the job of ``group`` cannot be used any more, or None."""
    return _C.failure(_backend(group))


def culprit(group: Optional["_dist.ProcessGroup"] = None) -> Optional[int]:
    """The rank that the failure is blamed on, or None."""
    return _C.culprit(_backend(group))


_register()
if os.environ.get("WEFT_TRACE") and os.environ.get("WEFT_RECORD") != "0":
    record_every_ddp()
# Before Python ends, nothing of weft may run any more: what it holds may be Python's.
atexit.register(_C.close_all, _PATIENCE)
atexit.register(stop_all)
