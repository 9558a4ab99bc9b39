"""What is made of the operations on tensors: parameters, optimizers and objects of Python."""

from __future__ import annotations

import io
import pickle
from typing import Any, Dict, Iterable, List, Optional, Tuple, Union

import torch

from weft.torch.horovod._calls import allgather, broadcast_, broadcast_async_, synchronize
from weft.torch.horovod._world import ProcessSet, current, global_process_set

try:  # it writes functions and classes of the program's own file, too
    import cloudpickle as _writer
except ImportError:
    _writer = pickle  # type: ignore[assignment]


def broadcast_parameters(params: Union[Dict[str, Any], Iterable[Any]], root_rank: int) -> None:
    """Makes parameters those of `root_rank`, in place.

    Takes a ``state_dict()``, ``named_parameters()``, or tensors.
    """
    if isinstance(params, dict):
        named: List[Tuple[Optional[str], Any]] = sorted(params.items())
    elif isinstance(params, torch.Tensor) or isinstance(params, str):
        raise ValueError(f"invalid params of type: {type(params)}")
    else:
        try:
            named = [one if isinstance(one, tuple) else (None, one) for one in params]
        except TypeError:
            raise ValueError(f"invalid params of type: {type(params)}") from None
    for name, parameter in named:
        if not isinstance(parameter, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters got {type(parameter).__name__} as '{name}': only tensors "
                "can be sent; broadcast_object sends anything"
            )
    handles = [broadcast_async_(parameter, root_rank, name) for name, parameter in named]
    for handle in handles:
        synchronize(handle)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of `root_rank`, pickled on its way (by cloudpickle, if that is installed)."""
    own = current().rank == root_rank
    words = _pickled(obj) if own else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([words.numel()])
    broadcast_(size, root_rank, name and f"{name}.size", process_set)
    if not own:
        words = torch.empty(int(size), dtype=torch.uint8)
    broadcast_(words, root_rank, name and f"{name}.words", process_set)
    return obj if own else _unpickled(words)


def allgather_object(obj: Any, name: Optional[str] = None) -> List[Any]:
    """The objects of all ranks, in their order, pickled on their way."""
    words = _pickled(obj)
    sizes = allgather(torch.tensor([words.numel()]), name and f"{name}.sizes").tolist()
    gathered = allgather(words, name and f"{name}.words")
    return [_unpickled(one) for one in gathered.split(sizes)]


def _pickled(obj: Any) -> torch.Tensor:
    words = io.BytesIO()
    _writer.dump(obj, words)
    return torch.frombuffer(bytearray(words.getvalue()), dtype=torch.uint8).clone()


def _unpickled(words: torch.Tensor) -> Any:
    return pickle.loads(words.numpy().tobytes())


# ---- optimizers ----------------------------------------------------------------------------


class _Placeholder:
    """Stands for a tensor of an optimizer's state, which is sent beside it."""

    def __init__(self, tensor: torch.Tensor):
        self.shape, self.dtype = tensor.shape, tensor.dtype


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Optional[torch.nn.Module] = None
) -> None:
    """Makes an optimizer's options and state those of `root_rank`.

    Ranks that have no state yet, or another, get what `root_rank` has; if that has none, nobody
    has. `model` is not needed.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    said = None
    if current().rank == root_rank:
        said = (_options_of(optimizer), _state_of(optimizer, parameters))
    options, states = broadcast_object(said, root_rank, "optimizer")
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if [count for count, _ in options] != counts:
        raise ValueError(
            f"broadcast_optimizer_state: the groups have {counts} parameters here, and "
            f"{[count for count, _ in options]} on rank {root_rank}"
        )
    for group, (_count, others) in zip(optimizer.param_groups, options):
        group.update(others)
    tensors = []
    for number, (parameter, state) in enumerate(zip(parameters, states)):
        if state is None:
            optimizer.state.pop(parameter, None)
            continue
        own = optimizer.state.setdefault(parameter, {})
        own.update((name, _as_sent(own.get(name), value)) for name, value in state.items())
        for name in [name for name in own if name not in state]:
            del own[name]
        tensors += [
            (f"optimizer.{number}.{name}", own[name])
            for name, value in state.items()
            if isinstance(value, _Placeholder)
        ]
    broadcast_parameters(tensors, root_rank)


def _options_of(optimizer: torch.optim.Optimizer) -> List[Tuple[int, Dict[str, Any]]]:
    return [
        (len(group["params"]), {key: group[key] for key in group if key != "params"})
        for group in optimizer.param_groups
    ]


def _state_of(
    optimizer: torch.optim.Optimizer, parameters: List[torch.Tensor]
) -> List[Optional[Dict[str, Any]]]:
    out: List[Optional[Dict[str, Any]]] = []
    for parameter in parameters:
        state = optimizer.state.get(parameter)
        if not state:
            out.append(None)
            continue
        out.append({name: _to_send(value) for name, value in state.items()})
    return out


def _to_send(value: Any) -> Any:
    return _Placeholder(value) if _is_plain(value) else value


def _is_plain(value: Any) -> bool:
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return dense and value.device.type == "cpu"


def _as_sent(own: Any, value: Any) -> Any:
    """A value of the root, or a tensor of this rank into which the root's will be written."""
    if not isinstance(value, _Placeholder):
        return value
    fits = _is_plain(own) and own.shape == value.shape and own.dtype == value.dtype
    return own if fits else torch.empty(value.shape, dtype=value.dtype)
