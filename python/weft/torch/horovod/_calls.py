"""Horovod's collective operations on tensors.

Each is asynchronous underneath: it is handed to the Agreement of its process set, which starts it
on torch's process group over weft when all ranks have called it, and `synchronize` waits for it.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence, Tuple, Union

import torch
import torch.distributed as dist

from weft.torch.horovod._agree import JOIN, Agreement, HorovodInternalError, Operation, Request
from weft.torch.horovod._world import Part, ProcessSet, global_process_set, part_of, take_part
from weft.torch.horovod.compression import Compression

Average = 0
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

_COMBINED_BY = {
    Average: dist.ReduceOp.AVG,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


# ---- handles -------------------------------------------------------------------------------


class _Pending(NamedTuple):
    operation: Operation
    agreement: Agreement


_handles: Dict[int, _Pending] = {}
_numbers = itertools.count()


def _submit(request: Request, part: Part, run: Callable[[Operation, List[Request]], None]) -> int:
    agreement = part.agreement
    assert agreement is not None
    if not request.name:
        request = request._replace(name=agreement.name_for(request.kind))
    operation = Operation(request, run)
    agreement.submit(operation)
    handle = next(_numbers)
    _handles[handle] = _Pending(operation, agreement)
    return handle


def poll(handle: int) -> bool:
    """Whether the operation has ended, so that synchronize() would return at once."""
    pending = _handles.get(handle)
    if pending is None:
        raise ValueError(f"handle {handle} is of no operation, or was synchronized before")
    return pending.operation.done()


def synchronize(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result; None if it was done before."""
    pending = _handles.pop(handle, None) if isinstance(handle, int) else None
    if pending is None:
        return None
    operation, agreement = pending
    agreement.wait_until_started(operation)
    try:
        if operation.failure is not None:
            raise operation.failure
        for work in operation.works:
            work.wait()
    except HorovodInternalError:
        raise
    except Exception as failure:
        name = f"{operation.request.kind} '{operation.request.name}'"
        raise HorovodInternalError(f"{name}: {failure}") from failure
    return operation.finish()


def agree_on(title: str) -> None:
    """Waits until all ranks of the job have come to the same place."""
    request = Request("barrier", title)
    synchronize(_submit(request, part_of(global_process_set), _at_once))


def _at_once(_operation: Operation, _calls: List[Request]) -> None:
    """For what is done when all have called it."""


# ---- arguments -----------------------------------------------------------------------------


def _op_of(op: Optional[int], average: Optional[bool]) -> int:
    if op is not None:
        if average is not None:
            raise ValueError(
                "The op parameter supersedes average. Please provide only one of them."
            )
    elif average is not None:
        warnings.warn(
            "Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=4
        )
        op = Average if average else Sum
    else:
        op = Average
    check_op(op)
    return op


def check_op(op: int) -> None:
    if op == Adasum:
        raise NotImplementedError(
            "hvd.Adasum: weft does not offer Adasum; use op=hvd.Average (docs/horovod.md)"
        )
    if op not in _COMBINED_BY:
        raise ValueError(f"op is {op}: expected hvd.Average, Sum, Min, Max or Product")


def _check(tensor: torch.Tensor, kind: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{kind} takes tensors, and got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{kind} got a tensor on {tensor.device}; only tensors in the processor's memory can "
            "be sent"
        )
    if tensor.layout != torch.strided:
        raise ValueError(f"{kind} takes dense tensors, and got one of layout {tensor.layout}")


def _check_rows(tensors: Sequence[torch.Tensor], kind: str) -> None:
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError(
                f"{kind} got a tensor without dimensions, which has no rows: give it one, as "
                "tensor.unsqueeze(0) does"
            )


def _check_mean(tensors: Sequence[torch.Tensor], op: int, scaled: bool, kind: str) -> None:
    if any(one.dtype == torch.bool for one in tensors) and (op == Average or scaled):
        raise ValueError(
            f"{kind}: truth values have no average and no factors; op=hvd.Sum tells whether any "
            "is true, op=hvd.Product whether all are"
        )


def _request(
    kind: str,
    name: Optional[str],
    tensors: Sequence[torch.Tensor],
    op: int = -1,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root: int = -1,
    splits: Sequence[int] = (),
) -> Request:
    for tensor in tensors:
        _check(tensor, kind)
    dtypes = [str(tensor.dtype).replace("torch.", "") for tensor in tensors]
    shapes = [list(tensor.shape) for tensor in tensors]
    return Request(
        kind, name or "", dtypes, shapes, op, float(prescale), float(postscale), root, list(splits)
    )


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the operation may change."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:  # cut off, as a conversion to an integer does
        tensor.copy_(tensor.double().mul_(factor))


def _combined_by(tensor: torch.Tensor, op: int) -> Any:
    """Integers are added, and divided in the end."""
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    return dist.ReduceOp.SUM if op == Average and whole else _COMBINED_BY[op]


def _finish(tensor: torch.Tensor, op: int, postscale: float, ranks: int) -> None:
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    if op != Average or not whole:
        _scale(tensor, postscale)
    elif postscale == 1.0:
        tensor.copy_(torch.div(tensor, ranks, rounding_mode="trunc"))
    else:
        _scale(tensor, postscale / ranks)


# ---- all-reduce ----------------------------------------------------------------------------


def _allreduce(
    tensors: Sequence[torch.Tensor],
    in_place: bool,
    op: int,
    name: Optional[str],
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    pack: Callable[[Sequence[torch.Tensor]], Any],
) -> int:
    part = part_of(process_set)
    request = _request("allreduce", name, tensors, op, prescale, postscale)
    _check_mean(tensors, op, prescale != 1.0 or postscale != 1.0, "allreduce")
    memory = [one.detach() if in_place else _own(one) for one in tensors]
    results = list(tensors) if in_place else memory
    for one in memory:
        _scale(one, prescale)

    def finish() -> Any:
        for one in memory:
            _finish(one, op, postscale, len(part.ranks))
        return pack(results)

    def run(operation: Operation, _calls: List[Request]) -> None:
        operation.finish = finish
        _start_allreduce(operation, memory, op, part)

    return _submit(request, part, run)


def _start_allreduce(
    operation: Operation, memory: Sequence[torch.Tensor], op: int, part: Part
) -> None:
    for one in memory:
        combine = _combined_by(one, op)
        operation.works.append(dist.all_reduce(one, combine, group=part.group, async_op=True))


def announce_gradients() -> int:
    """Tells ranks that have joined that the others exchange gradients."""
    request = Request("gradients", "gradients of DistributedOptimizer")
    return _submit(request, part_of(global_process_set), _at_once)


def zeros_for(request: Request, part: Part) -> Operation:
    """What a rank that has joined adds to an operation of the others."""
    if request.kind == "gradients":
        return Operation(request, lambda _operation, _calls: take_part())

    def run(operation: Operation, _calls: List[Request]) -> None:
        memory = [
            torch.zeros(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(request.shapes, request.dtypes)
        ]
        _start_allreduce(operation, memory, request.op, part)

    return Operation(request, run)


def _first(results: Sequence[torch.Tensor]) -> torch.Tensor:
    return results[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce(); the result comes from synchronize()."""
    op = _op_of(op, average)
    return _allreduce(
        [tensor], False, op, name, prescale_factor, postscale_factor, process_set, _first
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce_(): `tensor` belongs to the operation until it is synchronized."""
    op = _op_of(op, average)
    return _allreduce(
        [tensor], True, op, name, prescale_factor, postscale_factor, process_set, _first
    )


def allreduce_(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines a tensor of all ranks, in place."""
    return synchronize(
        allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    )


def _refuse_gradient(op: int) -> NoReturn:
    names = {Min: "Min", Max: "Max", Product: "Product"}
    raise NotImplementedError(
        f"an allreduce with op=hvd.{names[op]} has no gradient here: only sums and averages have"
    )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, op, name, prescale, postscale, process_set):
        ctx.options = (op, None, prescale, postscale, process_set)
        return synchronize(
            allreduce_async(tensor, None, name, op, prescale, postscale, process_set)
        )

    @staticmethod
    def backward(ctx, gradient):
        if ctx.options[0] not in (Average, Sum):
            _refuse_gradient(ctx.options[0])
        return (_Allreduce.apply(gradient, *ctx.options), *[None] * 5)


def allreduce(
    tensor: torch.Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A tensor of all ranks, combined: averaged, if `op` does not say otherwise.

    Gradients pass through: they are combined in the same way.
    """
    op = _op_of(op, average)
    small, ctx = compression.compress(tensor)
    combined = _Allreduce.apply(small, op, name, prescale_factor, postscale_factor, process_set)
    return compression.decompress(combined, ctx)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a grouped_allreduce(); the results come from synchronize()."""
    op = _op_of(op, average)
    return _allreduce(
        tensors, False, op, name, prescale_factor, postscale_factor, process_set, tuple
    )


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a grouped_allreduce_()."""
    op = _op_of(op, average)
    return _allreduce(
        tensors, True, op, name, prescale_factor, postscale_factor, process_set, tuple
    )


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tuple[torch.Tensor, ...]:
    """Combines several tensors of all ranks as one operation, in place."""
    return synchronize(
        grouped_allreduce_async_(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set
        )
    )


class _GroupedAllreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, op, name, prescale, postscale, process_set, *tensors):
        ctx.options = (op, None, prescale, postscale, process_set)
        return synchronize(
            grouped_allreduce_async(tensors, None, name, op, prescale, postscale, process_set)
        )

    @staticmethod
    def backward(ctx, *gradients):
        if ctx.options[0] not in (Average, Sum):
            _refuse_gradient(ctx.options[0])
        return (*[None] * 5, *_GroupedAllreduce.apply(*ctx.options, *gradients))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: Optional[int] = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> List[torch.Tensor]:
    """Several tensors of all ranks, combined as one operation. Gradients pass through."""
    op = _op_of(op, average)
    small, ctxs = zip(*[compression.compress(tensor) for tensor in tensors])
    combined = _GroupedAllreduce.apply(
        op, name, prescale_factor, postscale_factor, process_set, *small
    )
    return [compression.decompress(one, ctx) for one, ctx in zip(combined, ctxs)]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the sum or average of sparse tensors; call what it returns for the result."""
    if op not in (Average, Sum):
        check_op(op)
        raise ValueError("sparse tensors can be combined with hvd.Average and hvd.Sum only")
    own = tensor.detach().coalesce()
    indices = own.indices().transpose(0, 1).contiguous()
    handles = [
        allgather_async(indices, f"{name}.indices", process_set),
        allgather_async(own.values(), f"{name}.values", process_set),
    ]

    def result() -> torch.Tensor:
        where, values = [synchronize(handle) for handle in handles]
        if op == Average:
            values = values / len(part_of(process_set).ranks)
        return torch.sparse_coo_tensor(where.transpose(0, 1), values, own.shape).coalesce()

    return result


# ---- gathering -----------------------------------------------------------------------------


def _allgather(
    tensors: Sequence[torch.Tensor],
    name: Optional[str],
    process_set: ProcessSet,
    pack: Callable[[Sequence[torch.Tensor]], Any],
) -> int:
    part = part_of(process_set)
    request = _request("allgather", name, tensors)
    _check_rows(tensors, "allgather")
    inputs = [one.detach().contiguous() for one in tensors]

    def run(operation: Operation, calls: List[Request]) -> None:
        outputs = []
        for number, one in enumerate(inputs):
            rows = [call.shapes[number][0] for call in calls]
            output = one.new_empty([sum(rows), *one.shape[1:]])
            outputs.append(output)
            parts = list(output.split(rows))
            operation.works.append(dist.all_gather(parts, one, part.group, async_op=True))
        operation.finish = lambda: pack(outputs)

    return _submit(request, part, run)


def allgather_async(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather(); the result comes from synchronize()."""
    return _allgather([tensor], name, process_set, _first)


def _own_rows(
    gradients: Sequence[torch.Tensor], rows: Sequence[int], process_set: ProcessSet
) -> List[torch.Tensor]:
    """The average over ranks of what belongs to this rank's rows."""
    counts = allgather(torch.tensor([list(rows)]), process_set=process_set)
    start = counts[: part_of(process_set).rank].sum(0).tolist()
    means = grouped_allreduce(list(gradients), op=Average, process_set=process_set)
    return [mean.narrow(0, first, own) for mean, first, own in zip(means, start, rows)]


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, process_set, pack, *tensors):
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        ctx.process_set = process_set
        return synchronize(_allgather(tensors, name, process_set, pack))

    @staticmethod
    def backward(ctx, *gradients):
        return (None, None, None, *_own_rows(gradients, ctx.rows, ctx.process_set))


def allgather(
    tensor: torch.Tensor, name: Optional[str] = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The rows of all ranks, one rank's after the other's; ranks may have different numbers.

    Gradients pass through: each rank gets the average of what the ranks have for its rows.
    """
    _check(tensor, "allgather")
    _check_rows([tensor], "allgather")
    return _Allgather.apply(name, process_set, _first, tensor)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a grouped_allgather(); the results come from synchronize()."""
    return _allgather(tensors, name, process_set, tuple)


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Tuple[torch.Tensor, ...]:
    """allgather() of several tensors as one operation. Gradients pass through."""
    for tensor in tensors:
        _check(tensor, "allgather")
    _check_rows(tensors, "allgather")
    return _Allgather.apply(name, process_set, tuple, *tensors)


# ---- broadcast -----------------------------------------------------------------------------


def _broadcast(
    tensor: torch.Tensor,
    in_place: bool,
    root_rank: int,
    name: Optional[str],
    process_set: ProcessSet,
) -> int:
    part = part_of(process_set)
    if root_rank not in part.ranks:
        raise ValueError(f"broadcast: root_rank is {root_rank}: expected one of {part.ranks}")
    request = _request("broadcast", name, [tensor], root=root_rank)
    memory = tensor.detach() if in_place else _own(tensor)

    def run(operation: Operation, _calls: List[Request]) -> None:
        operation.finish = lambda: tensor if in_place else memory
        operation.works.append(dist.broadcast(memory, root_rank, part.group, async_op=True))

    return _submit(request, part, run)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast(); the result comes from synchronize()."""
    return _broadcast(tensor, False, root_rank, name, process_set)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast_(): `tensor` belongs to the operation until it is synchronized."""
    return _broadcast(tensor, True, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Makes `tensor` that of `root_rank` on all ranks."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, root_rank, name, process_set):
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return synchronize(broadcast_async(tensor, root_rank, name, process_set))

    @staticmethod
    def backward(ctx, gradient):
        part = part_of(ctx.process_set)
        mean = allreduce(gradient, op=Average, process_set=ctx.process_set)
        own = part.ranks[part.rank] == ctx.root_rank
        return mean if own else torch.zeros_like(mean), None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of `root_rank`. Gradients pass through: their average goes to that rank."""
    return _Broadcast.apply(tensor, root_rank, name, process_set)


# ---- all to all ----------------------------------------------------------------------------


def _sent_rows(call: Request, ranks: List[int], rank: int) -> List[int]:
    """How many rows a rank sends to each; fails on all ranks alike."""
    rows, count = call.shapes[0][0], len(ranks)
    title = f"alltoall '{call.name}': rank {ranks[rank]} "
    if not call.splits:
        if rows % count:
            raise HorovodInternalError(
                f"{title}has {rows} rows, which cannot be cut into {count} equal parts: give splits"
            )
        return [rows // count] * count
    if len(call.splits) != count or min(call.splits) < 0 or sum(call.splits) > rows:
        raise HorovodInternalError(
            f"{title}has {rows} rows and the splits {call.splits}: expected {count} numbers that "
            "are not negative and do not add up to more"
        )
    return call.splits


def alltoall_async(
    tensor: torch.Tensor,
    splits: Union[None, torch.Tensor, Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall(); synchronize() returns the rows and how many came from each rank."""
    part = part_of(process_set)
    own_splits = [] if splits is None else torch.as_tensor(splits).tolist()
    dtype = splits.dtype if isinstance(splits, torch.Tensor) else torch.int32
    request = _request("alltoall", name, [tensor], splits=own_splits)
    _check_rows([tensor], "alltoall")
    whole = tensor.detach().contiguous()

    def run(operation: Operation, calls: List[Request]) -> None:
        sent = [_sent_rows(call, part.ranks, rank) for rank, call in enumerate(calls)]
        out = sent[part.rank]
        came = [rows[part.rank] for rows in sent]
        output = whole.new_empty([sum(came), *whole.shape[1:]])
        rows = whole[: sum(out)]
        operation.works.append(
            dist.all_to_all_single(output, rows, came, out, part.group, async_op=True)
        )
        operation.finish = lambda: (output, torch.tensor(came, dtype=dtype))

    return _submit(request, part, run)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, splits, name, process_set):
        output, came = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.process_set, ctx.came = process_set, came
        ctx.rows = tensor.shape[0]
        if splits is None:
            return output
        ctx.mark_non_differentiable(came)
        return output, came

    @staticmethod
    def backward(ctx, gradient, *_dead):
        back, _ = alltoall(gradient, ctx.came, process_set=ctx.process_set)
        if back.shape[0] < ctx.rows:  # rows that were sent to nobody
            rest = back.new_zeros([ctx.rows - back.shape[0], *back.shape[1:]])
            back = torch.cat([back, rest])
        return back, None, None, None


def alltoall(
    tensor: torch.Tensor,
    splits: Union[None, torch.Tensor, Sequence[int]] = None,
    name: Optional[str] = None,
    process_set: ProcessSet = global_process_set,
) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]:
    """Sends rows to each rank, equally many or as `splits` says, and returns those that came.

    With `splits` also how many came from each rank. Gradients go back the way their rows came.
    """
    _check(tensor, "alltoall")
    return _Alltoall.apply(tensor, splits, name, process_set)


# ---- reduce-scatter ------------------------------------------------------------------------


def _reducescatter(
    tensors: Sequence[torch.Tensor],
    name: Optional[str],
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    pack: Callable[[Sequence[torch.Tensor]], Any],
) -> int:
    part = part_of(process_set)
    check_op(op)
    if op not in (Average, Sum):
        raise ValueError("reducescatter takes op=hvd.Average or hvd.Sum only")
    request = _request("reducescatter", name, tensors, op, prescale, postscale)
    _check_rows(tensors, "reducescatter")
    _check_mean(tensors, op, prescale != 1.0 or postscale != 1.0, "reducescatter")
    count = len(part.ranks)
    inputs, outputs = [], []
    for tensor in tensors:
        one = tensor.detach().contiguous()
        if prescale != 1.0:
            one = _own(one)
            _scale(one, prescale)
        each, more = divmod(one.shape[0], count)
        parts = one.split([each + (rank < more) for rank in range(count)])
        inputs.append(list(parts))
        outputs.append(torch.empty_like(parts[part.rank]))

    def finish() -> Any:
        for one in outputs:
            _finish(one, op, postscale, count)
        return pack(outputs)

    def run(operation: Operation, _calls: List[Request]) -> None:
        operation.finish = finish
        for parts, output in zip(inputs, outputs):
            combine = _combined_by(output, op)
            operation.works.append(
                dist.reduce_scatter(output, parts, combine, part.group, async_op=True)
            )

    return _submit(request, part, run)


def reducescatter_async(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter(); the result comes from synchronize()."""
    return _reducescatter(
        [tensor], name, op, process_set, prescale_factor, postscale_factor, _first
    )


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, name, op, process_set, prescale, postscale, pack, *tensors):
        ctx.process_set = process_set
        ctx.factor = prescale * postscale
        if op == Sum:
            ctx.factor *= len(part_of(process_set).ranks)
        return synchronize(
            _reducescatter(tensors, name, op, process_set, prescale, postscale, pack)
        )

    @staticmethod
    def backward(ctx, *gradients):
        scaled = [gradient * ctx.factor for gradient in gradients]
        return (*[None] * 6, *grouped_allgather(scaled, process_set=ctx.process_set))


def reducescatter(
    tensor: torch.Tensor,
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combines a tensor of all ranks, and gives each rank some of its rows.

    If the rows cannot be shared out equally, the first ranks have one more. Gradients pass through.
    """
    _check(tensor, "reducescatter")
    small, ctx = compression.compress(tensor)
    part = _Reducescatter.apply(
        name, op, process_set, prescale_factor, postscale_factor, _first, small
    )
    return compression.decompress(part, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a grouped_reducescatter(); the results come from synchronize()."""
    return _reducescatter(
        tensors, name, op, process_set, prescale_factor, postscale_factor, tuple
    )


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: Optional[str] = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> List[torch.Tensor]:
    """reducescatter() of several tensors as one operation. Gradients pass through."""
    small, ctxs = zip(*[compression.compress(tensor) for tensor in tensors])
    parts = _Reducescatter.apply(
        name, op, process_set, prescale_factor, postscale_factor, tuple, *small
    )
    return [compression.decompress(one, ctx) for one, ctx in zip(parts, ctxs)]


# ---- all together --------------------------------------------------------------------------


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until all ranks have called it."""
    synchronize(_submit(Request("barrier", ""), part_of(process_set), _at_once))


def join(device: int = -1) -> int:
    """For a rank that has no more data: takes part with zeros until all have joined.

    Returns the last rank that joined. Averages still divide by all ranks. `device` means nothing.
    """

    def run(operation: Operation, calls: List[Request]) -> None:
        operation.finish = lambda: calls[0].root

    return synchronize(_submit(Request(JOIN, JOIN), part_of(global_process_set), run))
