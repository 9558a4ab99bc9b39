"""Not offered: jobs whose ranks come and go. Every name of ``horovod.torch.elastic`` says so."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

__all__ = ["ElasticSampler", "TorchState", "init", "run", "run_fn", "shutdown"]


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"hvd.elastic.{name}: weft does not add or remove ranks while a job runs; save "
        "checkpoints, and let `torchrun --max-restarts` start the job again from the last one "
        "(docs/horovod.md#elastic)"
    )


class ElasticSampler:
    """Not offered: use torch.utils.data.DistributedSampler."""

    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0):
        _refuse("ElasticSampler")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Not offered."""
        _refuse("ElasticSampler")

    def record_batch(self, batch_idx: int, batch_size: int) -> NoReturn:
        """Not offered."""
        _refuse("ElasticSampler")

    def reset(self) -> NoReturn:
        """Not offered."""
        _refuse("ElasticSampler")

    def set_epoch(self, epoch: int) -> NoReturn:
        """Not offered."""
        _refuse("ElasticSampler")

    def state_dict(self) -> NoReturn:
        """Not offered."""
        _refuse("ElasticSampler")


class TorchState:
    """Not offered: save checkpoints with torch.save."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any):
        _refuse("TorchState")

    def restore(self) -> NoReturn:
        """Not offered."""
        _refuse("TorchState")

    def save(self) -> NoReturn:
        """Not offered."""
        _refuse("TorchState")

    def sync(self) -> NoReturn:
        """Not offered."""
        _refuse("TorchState")


def init(*args: Any, **kwargs: Any) -> NoReturn:
    """Not offered."""
    _refuse("init")


def run(func: Callable) -> NoReturn:
    """Not offered."""
    _refuse("run")


def run_fn(func: Callable, reset: Callable) -> NoReturn:
    """Not offered."""
    _refuse("run_fn")


def shutdown(*args: Any, **kwargs: Any) -> NoReturn:
    """Not offered."""
    _refuse("shutdown")
