"""An optimizer that updates by the gradients of all ranks.

In the first step each gradient is an all-reduce of its own. After it, it is known which parameters
have dense gradients, and those go by weft's exchange, as the job's Plan says (buckets, order,
partition, credit). It is one a job, of one optimizer, of all ranks; where it cannot be had, and
where something is asked for that it does not do (compression, groups, process sets, sparse
gradients), all-reduces go on.
"""

from __future__ import annotations

import collections
import contextlib
import warnings
import weakref
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple, Union

import torch
import torch.distributed as dist

from weft.torch._gradients import Gradients
from weft.torch._model import Tensor
from weft.torch.horovod._agree import HorovodInternalError
from weft.torch.horovod._calls import (
    Average,
    Sum,
    allreduce,
    allreduce_async_,
    announce_gradients,
    check_op,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from weft.torch.horovod._functions import broadcast_object
from weft.torch.horovod._world import ProcessSet, current, global_process_set, size, whole_backend
from weft.torch.horovod.compression import Compression

Named = Optional[Iterable[Tuple[str, torch.Tensor]]]
Groups = Union[None, int, List[List[torch.Tensor]]]
# Puts the combined gradients where they belong.
Arrival = Callable[[], None]


class _DistributedOptimizer(torch.optim.Optimizer):
    """What is before the user's class in that of the object that DistributedOptimizer returns.

    Each parameter's gradient is combined over the ranks as soon as it was accumulated often enough;
    step() waits for all of them.
    """

    def _distribute(
        self,
        named_parameters: Named,
        compression: Any,
        backward_passes_per_step: int,
        op: int,
        gradient_predivide_factor: float,
        groups: Groups,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._compression = compression
        self._parameter_names = _names_of(named_parameters, self.param_groups)
        self.backward_passes_per_step = backward_passes_per_step
        self.op = op
        self.gradient_predivide_factor = gradient_predivide_factor
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self._synchronized = False
        self._should_synchronize = True
        self._trained = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._passes_left = {parameter: backward_passes_per_step for parameter in self._trained}
        self._touched: set = set()  # got a gradient since the last synchronize()
        self._sent: set = set()  # all that it was to get
        self._on_way: set = set()
        self._arrivals: List[Arrival] = []
        self._gradients: Optional[Gradients] = None  # those that go by the exchange
        self._announcement: Optional[int] = None  # of this step, to ranks that have joined
        self._group_of: Dict[torch.Tensor, List[torch.Tensor]] = {}
        self._is_distributed = bool(process_set.included()) and size() > 1
        if not self._is_distributed:
            return
        if groups:
            self._group_of = self._make_groups(groups)
        self._may_exchange = (
            not groups and compression is Compression.none and process_set is global_process_set
        )
        self._hooks = {
            parameter: parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in self._trained
        }

    def _make_groups(self, groups: Groups) -> Dict[torch.Tensor, List[torch.Tensor]]:
        if isinstance(groups, int):
            # Ranks may list them in different orders, and cut alike.
            names = [self._parameter_names[parameter] for parameter in self._trained]
            root = (self.process_set.ranks or [0])[0]
            order = broadcast_object(names, root, process_set=self.process_set)
            by_name = {self._parameter_names[one]: one for one in self._trained}
            listed = [by_name[name] for name in order if name in by_name]
            each, more = divmod(len(listed), groups)
            lists, start = [], 0
            for number in range(groups):
                end = start + each + (number < more)
                lists.append(listed[start:end])
                start = end
        else:
            trained = set(self._trained)
            lists = [[one for one in group if one in trained] for group in groups or []]
        return {parameter: group for group in lists for parameter in group}

    # ---- backward --------------------------------------------------------------------------

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self._is_due(parameter):
            return
        self._sent.add(parameter)
        group = self._group_of.get(parameter, [parameter])
        if all(one in self._sent for one in group):
            self._send(group)

    def _is_due(self, parameter: torch.Tensor) -> bool:
        """Counts a gradient; whether it was the last that is accumulated here."""
        if self._passes_left[parameter] <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to "
                "step(). Increase backward_passes_per_step to accumulate gradients locally."
            )
        self._touched.add(parameter)
        self._passes_left[parameter] -= 1
        return self._passes_left[parameter] == 0

    def _send(self, group: List[torch.Tensor]) -> None:
        self._on_way.update(group)
        for parameter in group:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse and self.sparse_as_dense:
                parameter.grad = parameter.grad.to_dense()
        dense = [one for one in group if not one.grad.is_sparse]
        for parameter in group:
            if parameter.grad.is_sparse:
                self._arrivals.append(self._send_sparse(parameter))
        if len(dense) == 1:
            self._arrivals.append(self._send_one(dense[0]))
        elif dense:
            self._arrivals.append(self._send_together(dense))

    def _send_one(self, parameter: torch.Tensor) -> Arrival:
        small, ctx = self._compression.compress(parameter.grad)
        handle = allreduce_async_(
            small,
            name=self._parameter_names[parameter],
            op=self.op,
            prescale_factor=1.0 / self.gradient_predivide_factor,
            postscale_factor=self.gradient_predivide_factor,
            process_set=self.process_set,
        )
        return lambda: self._arrived(parameter, synchronize(handle), ctx)

    def _send_together(self, parameters: List[torch.Tensor]) -> Arrival:
        small, ctxs = zip(*[self._compression.compress(one.grad) for one in parameters])
        handle = grouped_allreduce_async_(
            small,
            name=self._parameter_names[parameters[0]],
            op=self.op,
            prescale_factor=1.0 / self.gradient_predivide_factor,
            postscale_factor=self.gradient_predivide_factor,
            process_set=self.process_set,
        )

        def arrival() -> None:
            for parameter, result, ctx in zip(parameters, synchronize(handle), ctxs):
                self._arrived(parameter, result, ctx)

        return arrival

    def _send_sparse(self, parameter: torch.Tensor) -> Arrival:
        name = self._parameter_names[parameter]
        result = sparse_allreduce_async(parameter.grad, name, self.op, self.process_set)

        def arrival() -> None:
            parameter.grad = result()

        return arrival

    def _arrived(self, parameter: torch.Tensor, result: torch.Tensor, ctx: Any) -> None:
        gradient = self._compression.decompress(result, ctx)
        if parameter.grad is None:
            parameter.grad = gradient
        elif gradient is not parameter.grad:
            parameter.grad.copy_(gradient)

    # ---- weft's exchange -------------------------------------------------------------------

    def _try_to_exchange(self) -> None:
        """Between two steps, on all ranks: from now on dense gradients go by the exchange."""
        by_name = {self._parameter_names[one]: one for one in self._trained}
        names = sorted(by_name)
        # Of each parameter: on how many ranks it cannot go that way; in the end: how many are here.
        flags = [not _fits_exchange(by_name[name]) for name in names] + [True]
        counts = allreduce(torch.tensor(flags).int(), name="optimizer.exchange", op=Sum).tolist()
        if counts.pop() < size():
            return  # some have joined; perhaps next time
        self._may_exchange = False
        fit = {name for name, unfit in zip(names, counts) if not unfit}
        order = broadcast_object([name for name in by_name if name in fit])
        world = current()
        if not order or (world.exchanging is not None and world.exchanging() is not None):
            return
        layers, tensors = _described([(name, by_name[name]) for name in order])
        scale = 1.0 / self.gradient_predivide_factor
        if self.op == Average:
            scale /= size()
        try:
            gradients = Gradients(whole_backend(), layers, tensors, scale, self._sends)
        except ValueError:
            return  # it is of another model, on all ranks
        for parameter in gradients.parameters:
            self._hooks.pop(parameter).remove()
        self._gradients = gradients
        world.exchanging = weakref.ref(self)

    def _sends(self, index: int) -> bool:
        assert self._gradients is not None
        parameter = self._gradients.parameters[index]
        if not self._is_due(parameter):
            return False
        self._announce()
        if parameter.grad.is_sparse and self.sparse_as_dense:
            parameter.grad = parameter.grad.to_dense()
        return True

    def _announce(self) -> None:
        """Ranks that have joined must take part in this step."""
        if self._announcement is None:
            self._announcement = announce_gradients()

    def _finish_exchange(self, gradients: Gradients) -> None:
        self._announce()
        handle, self._announcement = self._announcement, None
        try:
            for index in gradients.finish():
                gradients.show(index)
            synchronize(handle)
            gradients.wait_all()
        except dist.DistError as failure:
            raise HorovodInternalError(f"DistributedOptimizer: {failure}") from failure
        if self.gradient_predivide_factor != 1.0:
            for parameter in gradients.parameters:
                parameter.grad.mul_(self.gradient_predivide_factor)
        gradients.begin()

    def _take_part(self) -> None:
        """A step of the others, while this rank has joined: with nothing."""
        gradients = self._gradients
        assert gradients is not None
        for parameter in gradients.parameters:
            parameter.grad = None
        gradients.finish()
        gradients.begin()

    # ---- what the program calls ------------------------------------------------------------

    def synchronize(self) -> None:
        """Waits until all gradients are those of all ranks; step() does it otherwise."""
        if self._is_distributed:
            try:
                self._send_rest()
                if self._gradients is not None:
                    self._finish_exchange(self._gradients)
                arrivals, self._arrivals = self._arrivals, []
                for arrival in arrivals:
                    arrival()
            finally:
                self._begin_step()
            if self._may_exchange:
                self._try_to_exchange()
        self._synchronized = True

    def _send_rest(self) -> None:
        """Of the all-reduces: gradients that have not come, and groups that are not complete."""
        by_exchange = set(self._gradients.parameters) if self._gradients is not None else set()
        for parameter in self._trained:
            group = self._group_of.get(parameter, [parameter])
            if parameter not in by_exchange and not all(one in self._on_way for one in group):
                self._send(group)

    def _begin_step(self) -> None:
        self._touched.clear()
        self._sent.clear()
        self._on_way.clear()
        for parameter in self._trained:
            self._passes_left[parameter] = self.backward_passes_per_step

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """step() inside does not wait, because synchronize() was called before::

            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with optimizer.skip_synchronize():
                optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Optional[Callable[[], Any]] = None) -> Any:
        """Waits for the gradients of all ranks, and updates by them.

        A closure's gradients are waited for each time that it was called.
        """
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are combined once more",
                    stacklevel=2,
                )
            if closure is None or self._touched:
                self.synchronize()
            if closure is not None:
                closure = self._with_synchronize(closure)
        self._synchronized = False
        return super().step(closure)

    def _with_synchronize(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def whole() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return whole

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Refused while gradients are accumulated or on their way."""
        if self._touched:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(). This is prohibited as it can cause "
                "a race condition."
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """How often each gradient is accumulated before it is sent, from now on."""
        self.backward_passes_per_step = passes
        for parameter in self._trained:
            self._passes_left[parameter] = passes

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the optimizer's own; what was accumulated before is forgotten."""
        self._arrivals.clear()
        if self._gradients is not None and not self._gradients.idle:
            self._finish_exchange(self._gradients)  # the other ranks have a part of it
        self._synchronized = False
        self._should_synchronize = True
        self._begin_step()
        super().load_state_dict(*args, **kwargs)

    @staticmethod
    def find_duplicates(lst: Iterable[Any]) -> set:
        """What is more than once in a list."""
        counts = collections.Counter(lst)
        return {one for one, count in counts.items() if count > 1}


_EXCHANGED = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _fits_exchange(parameter: torch.Tensor) -> bool:
    sparse = parameter.grad is not None and parameter.grad.is_sparse
    fits = parameter.dtype in _EXCHANGED and parameter.device.type == "cpu"
    return fits and not sparse and parameter.numel() > 0


def _described(named: List[Tuple[str, torch.Tensor]]) -> Tuple[List[str], List[Tensor]]:
    """Layers by the names of parameters, in their order: what is before the last dot."""
    layers: List[str] = []
    tensors = []
    for name, parameter in named:
        numbered = name.startswith(_WITHOUT_NAME)
        layer = name if numbered or "." not in name else name.rpartition(".")[0]
        if layer not in layers:
            layers.append(layer)
        tensors.append(Tensor(name, parameter, layers.index(layer)))
    return layers, tensors


_WITHOUT_NAME = "allreduce.noname."


def _names_of(named: Named, groups: List[Dict[str, Any]]) -> Dict[torch.Tensor, str]:
    if named is None:
        return {
            parameter: f"{_WITHOUT_NAME}{i}.{j}"
            for i, group in enumerate(groups)
            for j, parameter in enumerate(group["params"])
        }
    pairs = list(named)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()."
        )
    twice = _DistributedOptimizer.find_duplicates([name for name, _ in pairs])
    if twice:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(sorted(twice))}"
        )
    names = {parameter: name for name, parameter in pairs}
    unnamed = [
        f"number {j} of group {i}, of shape {list(parameter.shape)}"
        for i, group in enumerate(groups)
        for j, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{'; '.join(unnamed)}"
        )
    return names


def _check_groups(groups: Groups) -> None:
    wrong = "groups should be a non-negative integer or a list of list of torch.Tensor."
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups < 0:
            raise ValueError(wrong)
        return
    known = set()
    for parameter in [one for group in groups for one in group]:
        if not isinstance(parameter, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if parameter in known:
            raise ValueError("A parameter can only appear once in groups.")
        known.add(parameter)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Named = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """An optimizer of the same class that updates by the gradients of all ranks.

    Gradients are combined (averaged, or added with ``op=hvd.Sum``) while backward goes on. What it
    returns shares options and state with `optimizer`, which is not to be used any more. Each of
    `groups` is combined as one: lists of parameters, or into how many to cut them.
    """
    check_op(op)
    if op not in (Average, Sum):
        raise ValueError("DistributedOptimizer takes op=hvd.Average or hvd.Sum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    _check_groups(groups)
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (_DistributedOptimizer, kind), {}))
    # Whoever counts steps has put its own step() into the object.
    made.__dict__.update({k: v for k, v in optimizer.__dict__.items() if k != "step"})
    made._distribute(
        named_parameters,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        groups,
        sparse_as_dense,
        process_set,
    )
    return made
