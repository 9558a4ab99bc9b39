"""Updates of parameters that wait for their own gradients only: a plan's ``barrier: tensor``.

``optimizer.step()`` returns at once, and a parameter is updated when it is used next, which is in
the next forward: the sums of late layers travel while the first layers compute already. Until then
a parameter is of class :class:`Late`, whose every use updates it first, whoever it is that uses it:
a module, ``state_dict``, a print. So nobody sees an old value.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch.optim import optimizer as _optimizer

from weft.torch._gradients import Gradients, tensors_in

# Optimizers that update each parameter by its own gradient and state alone.
_NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop",
          "Rprop", "ASGD", "Adafactor")
SEPARABLE = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))

# What may be asked of a parameter without its value.
_HARMLESS = {
    method
    for attribute in (torch.Tensor.grad, torch.Tensor.requires_grad, torch.Tensor.shape,
                      torch.Tensor.dtype, torch.Tensor.device, torch.Tensor.layout,
                      torch.Tensor.is_leaf, torch.Tensor.is_sparse, torch.Tensor.ndim)
    for method in (attribute.__get__, attribute.__set__)
} | {torch.Tensor.grad.__delete__, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.dim}

# Whose update is due, and which number it has there: by the identity of the parameter.
_due: Dict[int, Tuple["LateUpdates", int]] = {}


class Late(torch.nn.Parameter):
    """A parameter whose update is due: any use of it updates it first."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func not in _HARMLESS:
            for parameter in tensors_in((args, kwargs or {}), Late):
                _update(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo):
        return copy.deepcopy(_update(self), memo)

    def __reduce_ex__(self, protocol):
        return _update(self).__reduce_ex__(protocol)


def _update(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    due = _due.get(id(parameter))
    if due is not None:
        updates, index = due
        updates.settle(index)
    return parameter


@contextlib.contextmanager
def _as_between_steps() -> Iterator[None]:
    """An update in the middle of a forward is not part of it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch._C.DisableTorchFunction())
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch._C._len_torch_dispatch_stack() > 0:
            from torch.utils._python_dispatch import _disable_current_modes

            stack.enter_context(_disable_current_modes())
        yield


class LateUpdates:
    """Delays the updates of `optimizer` for parameters of `gradients`, where that changes nothing.

    An update is delayed if its sum was not asked for before ``step()`` (clipping and gradient scalers
    ask for all), the optimizer is one of :data:`SEPARABLE`, and has no closure and no hooks of its
    steps, except such as say by an attribute ``weft_observes`` that they only look. Then it is done with the hyperparameters of that ``step()``, layer by layer. All others are done
    at once, after their sums have come.
    """

    def __init__(
        self, gradients: Gradients, optimizer: torch.optim.Optimizer, may_delay: bool = True
    ) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._number = {id(p): index for index, p in enumerate(gradients.parameters)}
        self._allowed = may_delay and type(optimizer) in SEPARABLE
        self._layer: Dict[int, List[int]] = {}  # what is due, by layer
        self._options: Dict[int, dict] = {}  # of the step, by number: its group without parameters
        self._shown: List[int] = []  # whose gradients the step under way is not to see
        self._updating = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(lambda _optimizer: self.flush()),
            optimizer.register_load_state_dict_pre_hook(lambda _optimizer, _state: self.flush()),
        ]
        gradients.settle = self.settle

    @property
    def delays(self) -> bool:
        """Whether the plan in force, and the optimizer, leave updates for later."""
        return self._allowed and self._gradients.by_tensor

    def is_due(self, index: int) -> bool:
        """Whether an update of this parameter waits for its sum, or for its use."""
        return index in self._options

    def settle(self, index: int) -> None:
        """Updates the parameter's layer if that is due, and otherwise waits for its gradient."""
        layer = self._gradients.tensors[index].layer
        if index in self._options and layer in self._layer:
            self._update_layer(layer)
        else:
            self._gradients.wait(index)

    def flush(self) -> None:
        """Does all updates that are due."""
        for layer in sorted(self._layer):
            if layer in self._layer:
                self._update_layer(layer)

    def close(self) -> None:
        """Does what is due, and delays nothing from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._gradients.settle = self._gradients.wait
        try:
            self.flush()
        finally:
            self._give_up()

    # ---- the optimizer's step ----------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        if self._updating:
            return
        self.flush()
        if not self._may_delay(optimizer, args, kwargs):
            self._gradients.wait_all()  # says so if there is a step without some of its gradients
            return
        for group in optimizer.param_groups:
            delayed = [i for i in map(self._delayed, group["params"]) if i is not None]
            options = {key: _kept(value) for key, value in group.items() if key != "params"}
            for index in delayed:
                self._gradients.parameters[index].grad = None
                self._options[index] = options
                self._shown.append(index)

    def _delayed(self, parameter: torch.Tensor) -> Any:
        index = self._number.get(id(parameter))
        if index is None or type(parameter) is not torch.nn.Parameter:
            return None
        return index if parameter.grad is self._gradients.unread[index] else None

    def _after_step(self, _optimizer: torch.optim.Optimizer, _args: tuple, _kwargs: dict) -> None:
        if self._updating:
            return
        for index in self._shown:
            self._gradients.show(index)
            self._layer.setdefault(self._gradients.tensors[index].layer, []).append(index)
            parameter = self._gradients.parameters[index]
            _due[id(parameter)] = (self, index)
            parameter.__class__ = Late
        self._shown = []

    def _may_delay(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> bool:
        closure = args[1:] + tuple(kwargs.values())
        own = {hook.id for hook in self._hooks}
        hooks = (
            *(h for i, h in optimizer._optimizer_step_pre_hooks.items() if i not in own),
            *(h for i, h in optimizer._optimizer_step_post_hooks.items() if i not in own),
            *_optimizer._global_optimizer_pre_hooks.values(),
            *_optimizer._global_optimizer_post_hooks.values(),
        )
        return (
            self.delays
            and (self._gradients.complete or self._gradients.idle)
            and all(argument is None for argument in closure)
            and all(getattr(hook, "weft_observes", False) for hook in hooks)
        )

    # ---- an update ---------------------------------------------------------------------------

    def _update_layer(self, layer: int) -> None:
        indices = self._layer[layer]
        if self._gradients.on_wait is not None:
            self._gradients.on_wait(layer)
        try:
            self._gradients.wait_for(indices)
        except BaseException:
            # There is no sum, and there will be none: the parameters stay what they are.
            self._give_up()
            raise
        del self._layer[layer]
        groups: Dict[int, dict] = {}
        shown = []
        for index in indices:
            options = self._options.pop(index)
            parameter = self._gradients.parameters[index]
            self._as_before(parameter)
            shown.append(parameter.grad)
            parameter.grad = self._gradients.slots[index]
            groups.setdefault(id(options), {**options, "params": []})["params"].append(parameter)
        self._step(list(groups.values()))
        for index, gradient in zip(indices, shown):
            if gradient is not self._gradients.unread[index]:
                self._gradients.parameters[index].grad = gradient

    def _step(self, groups: List[dict]) -> None:
        optimizer, everything = self._optimizer, self._optimizer.param_groups
        optimizer.param_groups, self._updating = groups, True
        try:
            with _as_between_steps():
                type(optimizer).step(optimizer)
        finally:
            optimizer.param_groups, self._updating = everything, False

    def _as_before(self, parameter: torch.nn.Parameter) -> None:
        parameter.__class__ = torch.nn.Parameter
        _due.pop(id(parameter), None)

    def _give_up(self) -> None:
        for index in self._options:
            self._as_before(self._gradients.parameters[index])
        self._layer, self._options, self._shown = {}, {}, []


def _kept(value: Any) -> Any:
    # A rate that is a tensor is changed in place by schedulers.
    return value.clone() if isinstance(value, torch.Tensor) else value
