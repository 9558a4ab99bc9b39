"""What a training step does beside communication, for the trace: hooks of torch, which tell moments.

The moments become spans in C++ (python/src/recording.h says how); here they are found.
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from typing import Any, Iterator, List, Optional

import torch
import torch.distributed as _dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as _optimizers
from torch.utils.data import dataloader as _loaders

from weft.torch import _C
from weft.torch._attach import _attached
from weft.torch._model import Description, backend_of, describe


class Nothing:
    """What a hook becomes in a copy of its model, which is not recorded."""

    def __call__(self, *_: Any) -> None:
        return None


class _Hook:
    def __init__(self, recording: "_C.Recording"):
        self.recording = recording

    def __reduce__(self) -> Any:
        return Nothing, ()


# Who sums the gradients of a pass.
_NOBODY, _DDP, _EXCHANGE = range(3)


class _Begins(_Hook):
    """Before the model's forward; passes that do not train are none of ours."""

    def __init__(self, recording: "_C.Recording", parameters: int):
        super().__init__(recording)
        self.parameters = parameters
        self.looks = _LOOKS

    def __call__(self, module: torch.nn.Module, _inputs: Any) -> None:
        if not module.training or not torch.is_grad_enabled():
            return
        attachment = _attached.get(module)
        if attachment is not None:
            gradients = attachment._gradients
            gradients.on_wait = self.recording.waits
            carrier = _NOBODY if attachment._accumulates else _EXCHANGE
            self.recording.begins(carrier, gradients.coming_step)
            return
        sums = getattr(module, "require_backward_grad_sync", False)
        self.recording.begins(_DDP if sums else _NOBODY)
        if sums and self.looks > 0:
            self.looks -= 1
            self._look_for_buckets(module)

    def _look_for_buckets(self, model: DistributedDataParallel) -> None:
        bucket_of = _buckets_of(model, self.parameters)
        if bucket_of is not None:
            self.recording.buckets(bucket_of)
            self.looks = 0


# DDP makes its buckets anew after the first pass, and tells some passes later.
_LOOKS = 20
_NO_BUCKET = 0xFFFFFFFF


def _buckets_of(model: DistributedDataParallel, parameters: int) -> Optional[List[int]]:
    """The bucket of each trained parameter, as DDP tells it; None while it does not."""
    if model.parameters_to_ignore:
        return None
    told = model._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    if not told:
        return None
    bucket_of = [_NO_BUCKET] * parameters
    for bucket, members in enumerate(told.split(",")):
        for member in members.split():
            if int(member) >= parameters:
                return None
            bucket_of[int(member)] = bucket
    return bucket_of


class _Forwarded(_Hook):
    def __call__(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        self.recording.forwarded(list(_tensors(output)))


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors in what a model returned."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dataclass_fields__"):
        yield from _tensors(vars(output))


class Recording:
    """What :func:`record` has begun; it ends with :meth:`stop`, the process group, or the model."""

    def __init__(
        self,
        recording: Optional["_C.Recording"],
        handles: List[Any],
        layer_of: "dict[int, int]",
        only: Optional[torch.optim.Optimizer],
    ):
        self._recording = recording
        self._handles = handles
        self._layer_of = layer_of
        self._only = weakref.ref(only) if only is not None else None

    @property
    def on(self) -> bool:
        """Whether anything is recorded: there is a trace, and nobody has stopped this."""
        return self._recording is not None

    def stop(self) -> None:
        """Records nothing more of this model, and takes its hooks away."""
        if self._recording is not None:
            self._recording.stop()
        self._recording = None
        for handle in self._handles:
            handle.remove()
        self._handles = []
        _live.discard(self)

    def _updated_by(self, optimizer: torch.optim.Optimizer) -> bool:
        if self._recording is None:
            return False
        if self._only is not None:
            return self._only() is optimizer
        return any(
            id(parameter) in self._layer_of
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _layer_that_updates(self, optimizer: torch.optim.Optimizer) -> Optional[int]:
        """The layer of an optimizer that has parameters of one only."""
        layers = {
            self._layer_of.get(id(parameter))
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        return layers.pop() if len(layers) == 1 else None


_live: "weakref.WeakSet[Recording]" = weakref.WeakSet()
_of_model: "weakref.WeakKeyDictionary[torch.nn.Module, Recording]" = weakref.WeakKeyDictionary()


# The hooks of each optimizer that has taken a step, if any model of ours is updated by it.
_watched: "weakref.WeakKeyDictionary[torch.optim.Optimizer, Any]" = weakref.WeakKeyDictionary()


def _before_hooks(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Before the optimizer's own hooks: what they do is no update, so ours stand next to it."""
    hooks = _watched.get(optimizer)
    if hooks is None:
        hooks = _watched[optimizer] = (
            optimizer.register_step_pre_hook(_before_update),
            optimizer.register_step_post_hook(_after_update),
        )
    optimizer._optimizer_step_pre_hooks.move_to_end(hooks[0].id)
    optimizer._optimizer_step_post_hooks.move_to_end(hooks[1].id, last=False)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _before_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in list(_live):
        # Without gradients nothing is updated: it may be left for later (weft.torch.attach).
        if one._updated_by(optimizer) and _has_gradients(optimizer):
            one._recording.update_begins()


def _after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for one in list(_live):
        if one._updated_by(optimizer):
            one._recording.update_ends(one._layer_that_updates(optimizer))


# Whoever asks whether somebody looks at an optimizer's steps may pass over these.
for _hook in (_before_hooks, _before_update, _after_update):
    _hook.weft_observes = True


@functools.lru_cache(maxsize=None)
def _watch_the_process() -> None:
    """Optimizers and data loaders of this process tell when they are at work."""
    _optimizers.register_optimizer_step_pre_hook(_before_hooks)
    load = _loaders._BaseDataLoaderIter.__next__

    @functools.wraps(load)
    def loads(self: Any) -> Any:
        live = [one._recording for one in _live if one._recording is not None]
        for recording in live:
            recording.loading_begins()
        batch = load(self)
        for recording in live:
            recording.loading_ends()
        return batch

    _loaders._BaseDataLoaderIter.__next__ = loads


def _sum_of(recording: "_C.Recording", group: Any) -> Any:
    """DDP's own all-reduce of a bucket, which tells when it was called and when it ended."""
    numbers = itertools.count()

    # torch looks at its name and at what it is annotated with.
    def sum_recorded(_state, bucket):
        buffer = bucket.buffer()
        # As DDP does it without a hook, bit for bit.
        buffer.mul_(1.0 / group.size())
        number, size, began = next(numbers), buffer.nbytes, recording.now()

        def ends(done):
            recording.summed(number, size, began)
            return done.value()[0]

        return _dist.all_reduce(buffer, group=group, async_op=True).get_future().then(ends)

    return sum_recorded


def _start(model: torch.nn.Module, description: Description) -> Optional["_C.Recording"]:
    """The recording of a model in its job's trace, or in one of its own; None where there is none."""
    group = getattr(model, "process_group", None) or _dist.group.WORLD
    if group is None:
        raise ValueError("record: there is no process group: call init_process_group first")
    parameters = [(one.name, one.parameter, one.layer) for one in description.tensors]
    backend = backend_of(group)
    if backend is not None:
        return _C.record(backend, description.layers, parameters)
    folder = os.environ.get("WEFT_TRACE")
    if not folder:
        return None
    recording = _C.record_alone(
        folder, _dist.get_rank(), _dist.get_world_size(), description.layers, parameters
    )
    # There is room for one hook: where the program has its own, its sums are not seen.
    if isinstance(model, DistributedDataParallel) and not model._comm_hooks:
        model.register_comm_hook(None, _sum_of(recording, group))
    return recording


def record(
    model: torch.nn.Module, optimizer: Optional[torch.optim.Optimizer] = None
) -> Recording:
    """Records forward, backward and update of ``model``, and what happens between them.

    Call it once, after ``DistributedDataParallel`` has wrapped the model, on all ranks alike. It
    adds to the trace that ``WEFT_TRACE`` asks for, in which the messages are already: iterations,
    forward and backward of each module that has parameters of its own, gradients, updates, loading
    of data and memory; without a trace it does nothing at all. With ``optimizer`` only its steps
    are updates, otherwise those of all that have parameters of the model.

    Over another backend than weft each rank makes a trace of its own, with DDP's all-reduces from
    their call to their end.
    """
    known = _of_model.get(model)
    if known is not None and known.on:
        return known
    description = describe(model)
    recording = _start(model, description)
    if recording is None:
        return Recording(None, [], {}, None)
    _watch_the_process()
    handles = [
        module.register_forward_pre_hook(recording.hook_of(layer))
        for layer, module in enumerate(description.modules)
    ]
    begins = _Begins(recording, len(description.tensors))
    handles.append(model.register_forward_pre_hook(begins, prepend=True))
    handles.append(model.register_forward_hook(_Forwarded(recording)))
    layer_of = {id(one.parameter): one.layer for one in description.tensors}
    made = Recording(recording, handles, layer_of, optimizer)
    _live.add(made)
    _of_model[model] = made
    return made


def stop_all() -> None:
    """Ends every recording: the process does."""
    for one in list(_live):
        one.stop()


def record_every_ddp() -> None:
    """From now on each DDP model is recorded: what WEFT_TRACE alone can do."""
    make = DistributedDataParallel.__init__

    @functools.wraps(make)
    def makes(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        record(self)

    DistributedDataParallel.__init__ = makes
