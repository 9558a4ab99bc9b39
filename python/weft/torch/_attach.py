"""A DDP model whose gradients go by the job's Plan: :func:`attach`."""

from __future__ import annotations

import contextlib
import json
import os
import weakref
from typing import Any, Iterator, Optional, Union

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from weft.torch import _C, _model
from weft.torch._gradients import Gradients
from weft.torch._late import LateUpdates

_attached: "weakref.WeakKeyDictionary[DistributedDataParallel, Attachment]" = (
    weakref.WeakKeyDictionary()
)


class Attachment:
    """What :func:`attach` returns: the way of a model's gradients, until :meth:`detach`.

    `plan` is the name of the plan in force, `buckets` how many buckets it makes of this model,
    `late` whether ``optimizer.step()`` leaves updates to the next forward.
    """

    plan: str
    buckets: int
    late: bool

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optional[torch.optim.Optimizer],
        backend: Any,
    ) -> None:
        self._model = weakref.ref(model)
        self._group = model.process_group
        self._finds_unused = model.find_unused_parameters
        self._accumulates = False  # inside no_sync()
        self._armed = False  # there was a forward whose backward is to be summed
        self._local = True  # the last forward was one whose backward is not
        self._ended = False  # it was said which parameters this rank did not use
        self._gradients = self._exchange(model, backend)
        self._updates: Optional[LateUpdates] = None
        if optimizer is not None:
            self._updates = LateUpdates(self._gradients, optimizer, not _goes_past_python(model))
        self._look_at_plan()
        model.require_backward_grad_sync = False
        self._own = {
            "no_sync": self._no_sync,
            "join": self._refuse_join,
            "join_hook": self._refuse_join,
            "register_comm_hook": self._refuse_hook,
        }
        model.__dict__.update(self._own)
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward),
        ]

    def _exchange(self, model: DistributedDataParallel, backend: Any) -> Gradients:
        description = _model.describe(model)
        ignored = set(model.parameters_to_ignore)
        tensors = [tensor for tensor in description.tensors if tensor.name not in ignored]
        ranks = dist.get_world_size(self._group)
        return Gradients(backend, description.layers, tensors, 1.0 / ranks, self._sends)

    def __deepcopy__(self, _memo: dict) -> "Attachment":
        return self  # a copy of the model has the hooks too, which know that it is not theirs

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "weft: a model that weft is attached to cannot be pickled whole: save its "
            "state_dict(), or detach() first"
        )

    def synchronize(self) -> None:
        """Waits for all gradients, and does all updates that ``optimizer.step()`` has left."""
        if self._updates is not None:
            self._updates.flush()
        self._gradients.wait_all()

    def _look_at_plan(self) -> None:
        self.plan = self._gradients.plan[0]
        self.buckets = self._gradients.buckets
        self.late = self._updates is not None and self._updates.delays

    def change_plan(self, plan: Union[str, os.PathLike, dict]) -> None:
        """Goes on under another plan, a file, a preset or a document.

        All ranks call it between the same steps. It waits for all gradients, and does all updates
        that were left for later. If one of the ranks cannot take the plan, or was given another,
        all raise the same words, and the plan before goes on.
        """
        if not self._hooks:
            raise RuntimeError("weft: this model was detached: no plan carries its gradients")
        try:
            words = _words_of(plan)
            self.synchronize()
        except Exception as refusal:
            # The others ask this rank, too.
            self._gradients.change_plan("", str(refusal))
            raise
        self._gradients.change_plan(words)
        self._look_at_plan()

    def detach(self) -> None:
        """Gives the gradients back to DDP, on all ranks between the same steps.

        What was left for later is done first. A second time it does nothing.
        """
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        model = self._model()
        if model is not None:
            for name in self._own:
                model.__dict__.pop(name, None)
            model.require_backward_grad_sync = True
            _attached.pop(model, None)
        try:
            if self._updates is not None:
                self._updates.close()
        finally:
            self._gradients.close()

    # ---- a step ------------------------------------------------------------------------------

    def _before_forward(self, model: torch.nn.Module, _inputs: tuple) -> None:
        if not torch.is_grad_enabled():
            return
        if model is not self._model():
            raise RuntimeError(
                "weft: this is a copy of a model that weft is attached to, and nobody would sum "
                "its gradients: copy the module that DistributedDataParallel was given, and wrap "
                "the copy"
            )
        if model.require_backward_grad_sync:
            raise RuntimeError(
                "weft: require_backward_grad_sync was set on a model that weft is attached to: "
                "accumulate gradients inside no_sync(), or detach() first"
            )
        self._keep_sums()
        self._local = self._accumulates
        if self._local:
            return
        if self._finds_unused and not self._gradients.idle:
            self._end_backward()
        self._gradients.begin()
        self._armed, self._ended = True, False

    def _after_forward(self, model: torch.nn.Module, _inputs: tuple, _output: Any) -> None:
        # DDP sends buffers before a forward if the last one was made for a backward of all ranks.
        if model is self._model():
            model.require_forward_param_sync = torch.is_grad_enabled() and not self._accumulates

    def _keep_sums(self) -> None:
        """Backward will add to what ``p.grad`` is, so a sum has to be there before."""
        gradients = self._gradients
        for index, parameter in enumerate(gradients.parameters):
            if not gradients.is_due(index) or parameter.grad is not gradients.unread[index]:
                continue
            # One whose update is due will be there when forward has used the parameter.
            if self._updates is None or not self._updates.is_due(index):
                gradients.read(index)

    def _sends(self, _index: int) -> bool:
        gradients = self._gradients
        if not self._armed or gradients.complete:
            # No forward has announced this gradient: it is a local one, or one too many.
            return not self._local
        if self._finds_unused and gradients.idle:
            Variable._execution_engine.queue_callback(self._end_backward)
        return True

    def _end_backward(self) -> None:
        """Where parameters may be unused: says which are here, and hears which are everywhere."""
        if self._ended:
            return
        self._ended = True
        gradients = self._gradients
        without = gradients.finish()
        users = torch.ones(len(gradients.slots), dtype=torch.int32)
        users[without] = 0
        work = self._group.allreduce([users])
        if not without:
            return
        work.wait()
        for index in without:
            # What nobody used has no gradient, as on one rank.
            if users[index] > 0:
                gradients.show(index)

    # ---- in the place of DDP's own -------------------------------------------------------------

    @contextlib.contextmanager
    def _no_sync(self) -> Iterator[None]:
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    def _refuse_join(self, *_args: Any, **_options: Any) -> Any:
        raise RuntimeError(
            "weft: a model that weft is attached to takes no uneven inputs: detach() before join()"
        )

    def _refuse_hook(self, *_args: Any, **_options: Any) -> None:
        raise RuntimeError(
            "weft: gradients of a model that weft is attached to do not go through communication "
            "hooks: detach() before register_comm_hook()"
        )


def _goes_past_python(model: torch.nn.Module) -> bool:
    """Whether some of its code may read parameters without asking Python."""
    return any(
        isinstance(module, torch.jit.ScriptModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        for module in model.modules()
    )


def attach(
    model: DistributedDataParallel,
    optimizer: Optional[torch.optim.Optimizer] = None,
    plan: Union[str, os.PathLike, dict, None] = None,
) -> Attachment:
    """Carries out the job's Plan for the gradients of `model`, in the place of DDP's buckets.

    All ranks call it once, after ``DistributedDataParallel(...)``, of a process group of weft that
    has all ranks. The results of training are those of DDP. Where the plan says ``barrier: tensor``
    and `optimizer` is given and updates each parameter on its own, ``optimizer.step()`` returns at
    once, and the next forward waits layer by layer.

    `plan` is the file, the preset or the document of a plan. The first model begins with the plan
    that was chosen when the process group was made (``WEFT_PLAN``), and any other is refused;
    :meth:`Attachment.change_plan` changes it later.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"weft.torch.attach takes a DistributedDataParallel model, not {type(model).__name__}"
        )
    if model in _attached:
        raise ValueError("weft is attached to this model already: detach it first")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"weft.torch.attach takes a torch optimizer, not {type(optimizer).__name__}"
        )
    backend = _backend_of(model)
    _check_options(model)
    if plan is not None:
        _check_plan(backend, plan)
    attachment = Attachment(model, optimizer, backend)
    _attached[model] = attachment
    return attachment


def detach(model: DistributedDataParallel) -> None:
    """Gives the gradients of `model` back to DDP, on all ranks between the same steps."""
    _attachment_of(model).detach()


def synchronize(model: DistributedDataParallel) -> None:
    """Waits for all gradients of `model`, and does all updates that were left for the next forward.

    Python code needs no such call: whatever it reads is there when it reads it. Code that reads
    parameters or gradients past Python (an extension in C++) does.
    """
    _attachment_of(model).synchronize()


def _attachment_of(model: DistributedDataParallel) -> Attachment:
    attachment = _attached.get(model)
    if attachment is None:
        raise ValueError("weft is not attached to this model: call weft.torch.attach first")
    return attachment


def _backend_of(model: DistributedDataParallel) -> Any:
    backend = _model.backend_of(model.process_group)
    if backend is None:
        raise ValueError(
            "weft.torch.attach needs a model whose process group is of weft, and this one's is of "
            f"\"{dist.get_backend(model.process_group)}\": call init_process_group(\"weft\")"
        )
    return backend


def _check_options(model: DistributedDataParallel) -> None:
    # What DDP does in its own reducer would be lost without a word.
    refused = {
        "static_graph=True": model.static_graph,
        "mixed_precision": model.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(getattr(model, "_delay_all_reduce_params", None)),
        "a communication hook": bool(getattr(model, "_comm_hooks", None)),
        "the Python reducer": bool(getattr(model, "_use_python_reducer", False)),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"weft cannot be attached to a model with {what}: leave it out")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.device.type != "cpu":
            raise ValueError(
                f'weft cannot be attached to a model on an accelerator: parameter "{name}" is on '
                f"{parameter.device}: leave its gradients to DDP, which go over weft too"
            )
    for name, module in model.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            raise ValueError(
                f"weft cannot be attached to a model with sparse gradients (\"{name}\"): make it "
                "with sparse=False"
            )


def _words_of(plan: Union[str, os.PathLike, dict]) -> str:
    return json.dumps(plan) if isinstance(plan, dict) else os.fspath(plan)


def _check_plan(backend: Any, plan: Union[str, os.PathLike, dict]) -> None:
    name, does = _C.read_plan(_words_of(plan))
    job_name, job_does = _C.plan(backend)
    if does != job_does:
        raise ValueError(
            f"the job runs under the plan \"{job_name}\" ({job_does}), and \"{name}\" ({does}) is "
            "another: a job's plan is chosen when its process group is made, so set WEFT_PLAN to "
            "it before init_process_group"
        )
