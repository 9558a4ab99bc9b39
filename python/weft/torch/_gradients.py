"""Gradients of parameters, summed over all ranks by weft's own exchange, as the plan says.

The exchange knows what a process group does not: which gradient belongs to which layer, when it was
ready and who waits for it. So buckets, order, partition, credit and barrier of the job's Plan are
obeyed.

    backward ──hook of a parameter──► slot ──ready──► exchange ──► sum in the slot ──wait──► p.grad

A slot is memory of the exchange. While a sum is on its way ``p.grad`` is an :class:`Unread` tensor:
whoever uses it, an optimizer, a clipping, a print, waits for the sum first.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from weft.torch import _C
from weft.torch._model import Tensor


def tensors_in(value: Any, kind: type) -> List[Any]:
    """Those of class `kind` among the arguments of a call, in lists and dictionaries too."""
    if isinstance(value, kind):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [found for one in value for found in tensors_in(one, kind)]


class Unread(torch.Tensor):
    """A gradient whose sum may be on its way: any use of it waits."""

    _gradients: "Gradients"
    _index: int

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        for tensor in tensors_in((args, kwargs or {}), Unread):
            tensor._gradients.read(tensor._index)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _plain(self) -> torch.Tensor:
        self._gradients.read(self._index)
        return self._gradients.slots[self._index]

    def __deepcopy__(self, memo):
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol):
        return self._plain().__reduce_ex__(protocol)


class Gradients:
    """The gradients of `tensors`, from their hooks to their sums.

    `backend` is weft's backend of a process group with all ranks of the job. All ranks make it
    alike: names, sizes and layers are compared. Each gradient is multiplied by `scale` before it is
    added (``1 / ranks`` for a mean: the arithmetic of DDP).

    Steps: the gradients of one step are sent as they come, each once; :meth:`begin` says that those
    that come from now on are of the next. `sends` is asked by the hook of each parameter, with its
    number, whether the gradient that has just been accumulated goes out; if not, it stays what it
    is and the next one is added to it (accumulation).

        for each step:
            begin()
            loss.backward()        # each hook: sends(i)?  scale, ready
            finish()               # if some may have got no gradient
            p.grad.use()           # waits for this one; or wait_all() first

    `settle` is what is called, with a number, before a slot is read or written again; it may be
    replaced by something that does more than :meth:`wait`.

    Threads: one at a time, as autograd has it on a processor.
    """

    def __init__(
        self,
        backend: Any,
        layers: Sequence[str],
        tensors: Sequence[Tensor],
        scale: float,
        sends: Callable[[int], bool],
    ) -> None:
        self.layers = list(layers)
        self.tensors = list(tensors)
        self.parameters = [tensor.parameter for tensor in tensors]
        self.scale = scale
        self.settle: Callable[[int], None] = self.wait
        self._sends = sends
        # Told the layer whose sums are waited for in the middle of a forward.
        self.on_wait: Optional[Callable[[int], None]] = None
        self._exchange = _C.exchange(
            backend,
            self.layers,
            [tensor.name for tensor in tensors],
            [tensor.layer for tensor in tensors],
            [parameter.detach() for parameter in self.parameters],
        )
        self.slots: List[torch.Tensor] = self._exchange.slots()
        self.unread = [self._make_unread(index) for index in range(len(self.slots))]
        self._step: int = self._exchange.next_step()
        self._sent = [self._step - 1] * len(self.slots)  # the last step that was sent, by tensor
        self._waited = list(self._sent)  # the last whose sum came
        self._missing = len(self.slots)  # in this step
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(index))
            for index, parameter in enumerate(self.parameters)
        ]

    @property
    def plan(self) -> Tuple[str, str]:
        """The name of the plan in force, and the hash that says what it does."""
        return self._exchange.plan()

    @property
    def by_tensor(self) -> bool:
        """Whether that plan lets each tensor be waited for by itself."""
        return self._exchange.by_tensor()

    @property
    def buckets(self) -> int:
        """How many it makes of these tensors."""
        return self._exchange.buckets()

    def change_plan(self, words: str, refusal: Optional[str] = None) -> None:
        """Goes on under the plan that `words` are, a document, a file or a preset.

        All ranks call it between the same steps, when all sums were waited for. `refusal` says why
        this rank cannot: then none does.
        """
        self._exchange.change_plan(words, refusal)

    def _make_unread(self, index: int) -> Unread:
        unread = torch.Tensor._make_subclass(Unread, self.slots[index])
        unread._gradients, unread._index = self, index
        return unread

    def _hook_of(self, index: int) -> Callable[[torch.Tensor], None]:
        return lambda _parameter: self._accumulated(index)

    # ---- what goes out -----------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing of the present step was sent yet."""
        return self._missing == len(self.slots)

    @property
    def coming_step(self) -> int:
        """The step of the gradients that the next pass makes."""
        return self._step if self.idle else self._step + 1

    @property
    def complete(self) -> bool:
        """Whether all of the present step was sent."""
        return self._missing == 0

    def missing(self) -> List[int]:
        """What was not sent yet in the present step."""
        return [i for i in range(len(self.slots)) if self._sent[i] < self._step]

    def begin(self) -> None:
        """What comes from now on is of the next step, if anything came of the present one."""
        if self.idle:
            return
        if self._missing:
            raise RuntimeError(self._incomplete("the next step begins"))
        self._step += 1
        self._missing = len(self.slots)

    def finish(self) -> List[int]:
        """Sends what is left of the step; returns the numbers of those that have no gradient here.

        They count as zeros. What was accumulated before is a gradient.
        """
        without = []
        for index in self.missing():
            if self.parameters[index].grad is not None:
                self.send(index)
                continue
            self._may_write(index)
            self._exchange.ready_without(index, self._step)
            self._was_sent(index)
            without.append(index)
        return without

    def show(self, index: int) -> None:
        """Makes the sum the parameter's gradient, where it has none of its own."""
        self.parameters[index].grad = self.unread[index]

    def _accumulated(self, index: int) -> None:
        if self._sends(index):
            self.send(index)

    def send(self, index: int) -> None:
        """Sends the gradient that the parameter has; after that it is the sum."""
        if self._sent[index] == self._step:
            raise RuntimeError(
                f'weft: "{self.tensors[index].name}" got a second gradient in one step, after the '
                "first was sent: accumulate gradients inside no_sync(), or run the model forward "
                "before each backward"
            )
        parameter = self.parameters[index]
        gradient, slot, unread = parameter.grad, self.slots[index], self.unread[index]
        if gradient is None:
            raise RuntimeError(f'weft: "{self.tensors[index].name}" has no gradient to be sent')
        if gradient is unread or gradient is slot:
            slot.mul_(self.scale)
        else:
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f'weft: the gradient of "{self.tensors[index].name}" is sparse, and the '
                    "exchange takes dense ones only"
                )
            self._may_write(index)
            torch.mul(gradient.detach(), self.scale, out=slot)
        parameter.grad = unread
        self._exchange.ready(index, self._step)
        self._was_sent(index)

    def _may_write(self, index: int) -> None:
        if self._waited[index] < self._sent[index]:
            self.settle(index)

    def _was_sent(self, index: int) -> None:
        self._sent[index] = self._step
        self._missing -= 1

    # ---- what comes back ---------------------------------------------------------------------

    def read(self, index: int) -> None:
        """Waits until the parameter's gradient may be used, whatever is done to it."""
        self.settle(index)
        if self.parameters[index].grad is self.unread[index]:
            self.parameters[index].grad = self.slots[index]

    def wait(self, index: int) -> None:
        """Returns when the last sum of this tensor that was asked for is in its slot."""
        self.wait_for([index])

    def wait_for(self, indices: Sequence[int]) -> None:
        """The same for several, in this order."""
        for step in sorted({self._sent[i] for i in indices if self._waited[i] < self._sent[i]}):
            if step == self._step and self._missing:
                raise RuntimeError(self._incomplete("a sum is asked for"))
            due = [i for i in indices if self._waited[i] < self._sent[i] == step]
            self._exchange.wait(due, step)
            for index in due:
                self._waited[index] = step

    def is_due(self, index: int) -> bool:
        """Whether its last sum was not waited for yet."""
        return self._waited[index] < self._sent[index]

    def wait_all(self) -> None:
        """Waits for all sums; ``p.grad`` are ordinary tensors then."""
        self.wait_for(range(len(self.slots)))
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is self.unread[index]:
                parameter.grad = self.slots[index]

    def _incomplete(self, when: str) -> str:
        names = [self.tensors[index].name for index in self.missing()]
        shown = ", ".join(f'"{name}"' for name in names[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return (
            f"weft: {when}, and {len(names)} of {len(self.slots)} parameters got no gradient in "
            f"this one: {shown}{more}. If the model does not use them all in each step, give "
            "DistributedDataParallel find_unused_parameters=True; otherwise something ended "
            "backward before its end, or a parameter was frozen later"
        )

    def close(self) -> None:
        """Takes the hooks away. Sums that are parameters' gradients stay, in memory of their own.

        Those of a step that was left in the middle are gone.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        left = not (self.idle or self.complete)
        for index, parameter in enumerate(self.parameters):
            unread = parameter.grad is self.unread[index]
            if not unread and parameter.grad is not self.slots[index]:
                continue
            parameter.grad = None
            if not (left and self._sent[index] == self._step):
                self.settle(index)
                parameter.grad = self.slots[index].clone()
