#!/usr/bin/env python3
"""Horovod's interface over weft: every function against values that were computed by hand."""

import importlib
import inspect
import os
import signal
import time
import unittest
import warnings

import torch
import torch.distributed as dist

import weft.torch.horovod as hvd
from horovod_support import exchanged, five, near, refused, run_ranks, same
from support import answers

HERE = os.path.dirname(os.path.abspath(__file__))


def rows(rank, count):
    return torch.full((count, 2), float(rank))


# ---- what the ranks do -----------------------------------------------------------------------


def places(rank, size):
    refused(ValueError, "use hvd.init()", hvd.rank)
    assert not hvd.is_initialized()
    for _ in range(2):
        hvd.init()
        hvd.init()
        assert hvd.is_initialized()
        assert (hvd.rank(), hvd.size()) == (rank, size)
        assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
        assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
        same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [float(size)])
        hvd.shutdown()
        assert not hvd.is_initialized()
        refused(ValueError, "use hvd.init()", hvd.size)


def beside_torch(rank, size, backend):
    """The program has made torch's groups itself, and goes on using them."""
    dist.init_process_group(backend)
    for _ in range(2):
        hvd.init()
        assert (hvd.rank(), hvd.size(), hvd.local_size()) == (rank, size, size)
        parameters = five()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        for step in range(3):
            handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum)
            ours = torch.ones(1)
            dist.all_reduce(ours)
            same(ours, [float(size)])
            same(hvd.synchronize(handle), [float(size)])
            optimizer.zero_grad()
            (parameters[0] * (rank + 1)).sum().backward()
            optimizer.step()
            near(parameters[0].detach(), [-(step + 1) * (size + 1) / 2])
        # A job of weft has one exchange, and torch's group may outlive hvd's use of it.
        assert exchanged(optimizer) == 5
        hvd.shutdown()
    ours = torch.ones(1)
    dist.all_reduce(ours)
    same(ours, [float(size)])
    dist.destroy_process_group()


def sums(rank, size):
    hvd.init()
    total = size * (size + 1) // 2
    own = torch.full((2, 3), float(rank + 1), requires_grad=True)
    before = own.detach().clone()
    near(hvd.allreduce(own).detach(), torch.full((2, 3), total / size))
    same(own.detach(), before)
    for op, expected in ((hvd.Sum, total), (hvd.Min, 1), (hvd.Max, size),
                         (hvd.Product, [1, 1, 2, 6][size])):
        for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16,
                      torch.bfloat16, torch.float32, torch.float64):
            same(hvd.allreduce(torch.full((2,), rank + 1).to(dtype), op=op),
                 torch.full((2,), expected).to(dtype))
    # Integers are divided in the end, and cut off.
    same(hvd.allreduce(torch.tensor([rank, -rank, 7])), [(size - 1) // 2, -((size - 1) // 2), 7])
    same(hvd.allreduce(torch.tensor([rank == 0, False]), op=hvd.Sum), [True, False])
    refused(ValueError, "no average", hvd.allreduce, torch.tensor([True]))
    # Factors before and after.
    same(hvd.allreduce(torch.tensor([2.0]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
         [3.0 * size])
    same(hvd.allreduce(torch.tensor([5]), op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5),
         [int(2 * size * 1.5)])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        same(hvd.allreduce(torch.ones(1), average=False), [float(size)])
        same(hvd.allreduce(torch.ones(1), True), [1.0])
    assert [one.category for one in said] == [DeprecationWarning] * 2, said
    refused(ValueError, "supersedes", hvd.allreduce, torch.ones(1), average=True, op=hvd.Sum)
    refused(ValueError, "op is 17", hvd.allreduce, torch.ones(1), op=17)
    refused(TypeError, "got list", hvd.allreduce, [1.0])
    refused(ValueError, "processor's memory", hvd.allreduce, torch.ones(1, device="meta"))
    # 1 + 2**-12 is 1 with 16 bits.
    fine = torch.full((3,), 1 + 2**-12)
    same(hvd.allreduce(fine, compression=hvd.Compression.fp16), [1.0] * 3)
    same(hvd.allreduce(fine), fine)
    same(hvd.allreduce(torch.tensor([3]), compression=hvd.Compression.fp16), [3])
    # In place, and views.
    whole = torch.zeros(3, 4)
    column = whole[:, 1]
    column += rank + 1
    assert hvd.allreduce_(column, op=hvd.Sum) is column
    same(whole, torch.tensor([[0.0, total, 0, 0]] * 3))
    # Handles.
    ours = torch.full((2,), float(rank))
    handle = hvd.allreduce_async(ours, op=hvd.Sum)
    assert isinstance(handle, int)
    until = time.monotonic() + 20
    while not hvd.poll(handle):
        assert time.monotonic() < until
        time.sleep(0.001)
    same(hvd.synchronize(handle), [float(size * (size - 1) // 2)] * 2)
    same(ours, [float(rank)] * 2)
    assert hvd.synchronize(handle) is None
    refused(ValueError, "synchronized before", hvd.poll, handle)
    handle = hvd.allreduce_async_(ours, op=hvd.Max, name="in place")
    assert hvd.synchronize(handle) is ours
    same(ours, [float(size - 1)] * 2)
    # Several as one, also of different types.
    pair = [torch.full((2,), float(rank)), torch.tensor([rank])]
    got = hvd.grouped_allreduce(pair, op=hvd.Sum)
    assert isinstance(got, list)
    same(got[0], [float(size * (size - 1) // 2)] * 2)
    same(got[1], [size * (size - 1) // 2])
    same(hvd.synchronize(hvd.grouped_allreduce_async(pair, op=hvd.Max))[1], [size - 1])
    got = hvd.grouped_allreduce_(pair, op=hvd.Min, name="together")
    assert got[0] is pair[0]
    same(pair[0], [0.0, 0.0])
    got = hvd.grouped_allreduce([torch.tensor([0.5 + 2**-14])], compression=hvd.Compression.fp16)
    same(got[0], [0.5])
    hvd.synchronize(hvd.grouped_allreduce_async_(pair, name="together"))
    # Sparse.
    sparse = torch.sparse_coo_tensor([[0, rank]], [[1.0, 2.0], [3.0, 4.0]], (size, 2))
    dense = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()
    expected = torch.tensor([[3.0, 4.0]] * size)
    expected[0] += torch.tensor([float(size), 2.0 * size])
    same(dense, expected)
    near(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense(), expected / size)


def moves(rank, size):
    hvd.init()
    gathered = torch.cat([rows(r, r + 1) for r in range(size)])
    same(hvd.allgather(rows(rank, rank + 1)), gathered)
    same(hvd.synchronize(hvd.allgather_async(rows(rank, rank), name="some have none")),
         torch.cat([rows(r, r) for r in range(size)]))
    same(hvd.allgather(torch.tensor([rank == 1])), torch.arange(size) == 1)
    refused(ValueError, "no rows", hvd.allgather, torch.tensor(1.0))
    got = hvd.grouped_allgather([rows(rank, 1), torch.tensor([rank])])
    same(got[0], torch.cat([rows(r, 1) for r in range(size)]))
    same(got[1], torch.arange(size))
    same(hvd.synchronize(hvd.grouped_allgather_async([torch.tensor([rank])]))[0],
         torch.arange(size))

    last = size - 1
    ours = torch.tensor([float(rank), 5.0])
    same(hvd.broadcast(ours, last), [float(last), 5.0])
    same(ours, [float(rank), 5.0])
    same(hvd.synchronize(hvd.broadcast_async(ours, 0, name="of 0")), [0.0, 5.0])
    assert hvd.broadcast_(ours, last) is ours
    same(ours, [float(last), 5.0])
    scalar = torch.tensor(rank)
    assert hvd.synchronize(hvd.broadcast_async_(scalar, 1)) is scalar and scalar == 1
    refused(ValueError, "expected one of", hvd.broadcast, ours, size)

    # Row i of each part goes to rank i; rank r sends r + 1 rows to each.
    sent = torch.arange(size * (rank + 1)) // (rank + 1) + 10 * rank
    got, came = hvd.alltoall(sent, splits=[rank + 1] * size)
    same(got, torch.cat([torch.full((r + 1,), 10 * r + rank) for r in range(size)]))
    same(came, torch.arange(1, size + 1, dtype=torch.int32))
    _, came = hvd.alltoall(sent, torch.full((size,), rank + 1))
    assert came.dtype == torch.int64
    same(hvd.alltoall(torch.arange(2 * size)), torch.tensor([2 * rank, 2 * rank + 1] * size))
    got, came = hvd.synchronize(hvd.alltoall_async(torch.arange(size)))
    same(got, [rank] * size)
    same(came, torch.ones(size, dtype=torch.int32))
    # Rows that go to nobody.
    got, came = hvd.alltoall(torch.arange(5), splits=[0] * last + [1])
    assert came.tolist() == [int(rank == last)] * size and got.tolist() == [0] * sum(came)
    said = refused(hvd.HorovodInternalError, "cannot be cut", hvd.alltoall,
                   torch.zeros(size + (rank == 1)))
    assert "rank 1 " in said
    refused(hvd.HorovodInternalError, "expected", hvd.alltoall, torch.zeros(3), [2] * size)

    # One row more than can be shared out equally, and less rows than ranks.
    much = torch.arange(2.0 * size + 1) * (rank + 1)
    mean = torch.arange(2.0 * size + 1) * (size + 1) / 2
    first = 2 * rank + (rank > 0)
    near(hvd.reducescatter(much), mean[first:first + 2 + (rank == 0)])
    near(hvd.synchronize(hvd.reducescatter_async(torch.ones(1, 2), op=hvd.Sum)),
         torch.full((int(rank == 0), 2), float(size)))
    got = hvd.grouped_reducescatter([torch.ones(size), torch.full((size,), rank)], op=hvd.Sum,
                                    prescale_factor=2.0, postscale_factor=0.5)
    same(got[0], [float(size)])
    same(got[1], [size * (size - 1) // 2])
    got = hvd.synchronize(hvd.grouped_reducescatter_async([torch.arange(size)]))
    same(got[0], [rank])
    same(hvd.reducescatter(torch.full((size,), 1 + 2**-12), compression=hvd.Compression.fp16),
         [1.0])
    refused(ValueError, "Average or hvd.Sum", hvd.reducescatter, torch.ones(2), op=hvd.Max)
    hvd.barrier()


def gradients(rank, size):
    hvd.init()
    factor = float(rank + 1)
    mean = (size + 1) / 2

    def gradient(call, shape, weight=factor):
        own = torch.ones(shape, requires_grad=True)
        result = call(own)
        result = result[0] if isinstance(result, (tuple, list)) else result
        (result * weight).sum().backward()
        return own.grad

    near(gradient(hvd.allreduce, (3,)), [mean] * 3)
    near(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), (3,)), [mean * size] * 3)
    near(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0), (1,)),
         [3 * mean * size])
    near(gradient(lambda x: hvd.grouped_allreduce([x, x * 2], op=hvd.Sum), (2,)),
         [mean * size] * 2)
    # Each rank's own rows, of what all ranks think of them, averaged.
    total = size * (size + 1) // 2
    place = torch.arange(1.0, total + 1).unsqueeze(1)
    first = rank * (rank + 1) // 2
    got = gradient(hvd.allgather, (rank + 1, 2), place * factor)
    near(got, (place * mean)[first:first + rank + 1].expand(-1, 2))
    near(gradient(lambda x: hvd.grouped_allgather([x]), (1,)), [mean])
    near(gradient(lambda x: hvd.broadcast(x, 1), (2,)), [mean if rank == 1 else 0.0] * 2)
    back = torch.arange(1.0, size + 1).repeat_interleave(2)
    near(gradient(lambda x: hvd.alltoall(x, [2] * size), (2 * size,)), back)
    near(gradient(hvd.alltoall, (size,)), torch.arange(1.0, size + 1))
    near(gradient(lambda x: hvd.alltoall(x, [1] * size), (size + 2,)),
         torch.cat([torch.arange(1.0, size + 1), torch.zeros(2)]))
    near(gradient(hvd.reducescatter, (size,)), torch.arange(1.0, size + 1))
    near(gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum, postscale_factor=0.5), (size,)),
         torch.arange(1.0, size + 1) * size / 2)
    near(gradient(lambda x: hvd.grouped_reducescatter([x]), (size,)), torch.arange(1.0, size + 1))
    refused(NotImplementedError, "no gradient", gradient,
            lambda x: hvd.allreduce(x, op=hvd.Max), (1,))
    # A second derivative passes through as well.
    own = torch.tensor([2.0], requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(own**3).sum(), own, create_graph=True)
    first.sum().backward()
    near(own.grad, [12.0])


def order(rank, size):
    """Operations are matched by name, and what does not fit is an error and nothing more."""
    hvd.init()
    names = [f"tensor {number}" for number in range(60)]
    if rank == 1:
        names.reverse()
    handles = {name: hvd.allreduce_async(torch.tensor([float(name.split()[1]) + rank]), name=name,
                                         op=hvd.Sum) for name in names}
    for name, handle in handles.items():
        expected = float(name.split()[1]) * size + size * (size - 1) / 2
        same(hvd.synchronize(handle), [expected])
    # Different kinds as well, each counted for itself where there is no name.
    kinds = [lambda: hvd.allgather_async(torch.tensor([rank])),
             lambda: hvd.broadcast_async(torch.tensor([rank]), 1)]
    got = [hvd.synchronize(handle) for handle in [kind() for kind in kinds[:: 1 - 2 * (rank == 0)]]]
    got.sort(key=len)
    same(got[0], [1])
    same(got[1], torch.arange(size))

    def different(words, one, other):
        return refused(hvd.HorovodInternalError, words, one if rank == 1 else other)

    said = different("differ in shape", lambda: hvd.allreduce(torch.ones(2, 3), name="grad"),
                     lambda: hvd.allreduce(torch.ones(3, 2), name="grad"))
    assert "allreduce 'grad'" in said and "[2, 3] on rank 1" in said and "[3, 2] on rank 0" in said
    said = different("differ in type", lambda: hvd.allreduce(torch.ones(2), name="grad"),
                     lambda: hvd.allreduce(torch.ones(2).double(), name="grad"))
    assert "float32 on rank 1" in said and "float64 on rank 0" in said
    different("(op)", lambda: hvd.allreduce(torch.ones(2), name="grad"),
              lambda: hvd.allreduce(torch.ones(2), name="grad", op=hvd.Sum))
    different("prescale_factor",
              lambda: hvd.allreduce(torch.ones(2), name="grad", prescale_factor=2.0),
              lambda: hvd.allreduce(torch.ones(2), name="grad"))
    different("the kind of operation", lambda: hvd.allreduce(torch.ones(2), name="grad"),
              lambda: hvd.allgather(torch.ones(2), name="grad"))
    different("root_rank", lambda: hvd.broadcast(torch.ones(2), 0, name="grad"),
              lambda: hvd.broadcast(torch.ones(2), 1, name="grad"))
    different("beyond the first dimension", lambda: hvd.allgather(torch.ones(2, 2), name="grad"),
              lambda: hvd.allgather(torch.ones(2, 3), name="grad"))
    different("shape", lambda: hvd.reducescatter(torch.ones(size), name="grad"),
              lambda: hvd.reducescatter(torch.ones(size + 1), name="grad"))
    different("type", lambda: hvd.grouped_allreduce([torch.ones(1)] * 2, name="grad"),
              lambda: hvd.grouped_allreduce([torch.ones(1)], name="grad"))
    # A name that is in use on this rank. The other ranks are kept from calling it.
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
        refused(hvd.HorovodInternalError, "while another operation of that name is pending",
                hvd.allreduce_async, torch.ones(1), name="twice")
    else:
        time.sleep(0.3)
        handle = hvd.allreduce_async(torch.ones(1), name="twice")
    same(hvd.synchronize(handle), [1.0])
    # What is longer than what travels at once.
    long = [hvd.allreduce_async(torch.ones(1), name=f"{'n' * 300} {number}")
            for number in range(10 + 20 * rank)][:10]
    for handle in long:
        same(hvd.synchronize(handle), [1.0])


def names_that_differ(rank, size):
    """Ranks that wait for each other in vain are told so, by both names."""
    hvd.init()
    said = refused(hvd.HorovodInternalError, "all of them wait", hvd.allreduce, torch.ones(1),
                   name="loss" if rank == 1 else "accuracy")
    assert "'loss' was called by rank 1 and not by" in said, said
    assert "'accuracy' was called by" in said, said
    same(hvd.allreduce(torch.ones(1)), [1.0])
    # One that only computes is waited for, with a warning.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if rank == 1:
            time.sleep(1.5)
        same(hvd.allreduce(torch.ones(1), name="late"), [1.0])
    if rank != 1:
        assert any("has waited" in str(one.message) and "'late'" in str(one.message)
                   for one in told), told


def uneven(rank, size):
    """Ranks that have less data join, and the others go on."""
    hvd.init()
    for step in range(2 + rank):
        there = [r for r in range(size) if 2 + r > step]
        near(hvd.allreduce(torch.tensor([rank + 1.0])), [sum(r + 1 for r in there) / size])
        same(hvd.allreduce(torch.ones(2), name="sum", op=hvd.Sum), [float(len(there))] * 2)
        if len(there) < size:
            refused(hvd.HorovodInternalError, "has joined", hvd.allgather, torch.ones(1))
            refused(hvd.HorovodInternalError, "sums and averages", hvd.allreduce, torch.ones(1),
                    op=hvd.Max)
    if rank == size - 1:
        time.sleep(0.2)
    assert hvd.join() == size - 1
    # Those that had more to do have called more, and all begin again at one.
    same(hvd.allreduce(torch.ones(1), op=hvd.Sum), [float(size)])
    assert 0 <= hvd.join() < size


def sets(rank, size):
    known = hvd.ProcessSet([1, 0])
    assert known.included and known.size() is None and known.rank() is None
    hvd.init(process_sets=[known])
    assert known.ranks == [0, 1] and known.process_set_id == 1
    assert hvd.global_process_set.ranks == list(range(size))
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.size() == size and hvd.global_process_set.rank() == rank
    assert known.size() == 2 and known.included() == (rank < 2)
    last = hvd.add_process_set([0, size - 1])
    if rank < 2:
        assert known.rank() == rank
        same(hvd.allreduce(torch.tensor([rank + 1.0]), process_set=known), [1.5])
        same(hvd.allgather(torch.tensor([rank]), process_set=known), [0, 1])
        same(hvd.broadcast(torch.tensor([rank]), 1, process_set=known), [1])
        same(hvd.alltoall(torch.tensor([0, 1]), process_set=known), [rank, rank])
        same(hvd.reducescatter(torch.ones(2), op=hvd.Sum, process_set=known), [2.0])
        assert hvd.broadcast_object([rank], 1, process_set=known) == [1]
        own = torch.ones(1, requires_grad=True)
        hvd.broadcast(own * (rank + 1), 1, process_set=known).sum().backward()
        near(own.grad, [2.0 * rank])
        refused(ValueError, "expected one of", hvd.broadcast, torch.ones(1), 2, process_set=known)
        hvd.barrier(process_set=known)
    else:
        refused(ValueError, "not part of", hvd.allreduce, torch.ones(1), process_set=known)
        refused(ValueError, "not part of", known.rank)
    if last.included():
        # The ranks of a set are numbered in it, and roots in the job.
        same(hvd.broadcast(torch.tensor([rank]), size - 1, process_set=last), [size - 1])
    # Sets do not wait for each other.
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), process_set=last)
        same(hvd.allreduce(torch.ones(1), process_set=known), [1.0])
        same(hvd.synchronize(handle), [1.0])
    elif rank == 1:
        same(hvd.allreduce(torch.ones(1), process_set=known), [1.0])
    elif last.included():
        time.sleep(0.2)
        same(hvd.allreduce(torch.ones(1), process_set=last), [1.0])
    refused(ValueError, "duplicate", hvd.add_process_set, hvd.ProcessSet([0, 1]))
    refused(ValueError, "duplicate", hvd.add_process_set, list(range(size)))
    refused(ValueError, "expected different ranks", hvd.add_process_set, [0, size])
    refused(ValueError, "list of ranks", hvd.ProcessSet, "0")
    assert hvd.remove_process_set(known) and known.process_set_id is None
    assert not hvd.remove_process_set(known)
    assert not hvd.remove_process_set(hvd.global_process_set)
    if rank < 2:
        refused(ValueError, "not been registered", hvd.allreduce, torch.ones(1), process_set=known)
    again = hvd.add_process_set(known)
    if rank < 2:
        same(hvd.allreduce(torch.ones(1), process_set=again), [1.0])
    hvd.shutdown()


def objects(rank, size):
    hvd.init()
    assert hvd.broadcast_object({"epoch": rank}, root_rank=1) == {"epoch": 1}
    assert hvd.broadcast_object([1, 2] if rank == 0 else None, name="of different types") == [1, 2]
    assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(size)]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    for given in (model.state_dict(), model.named_parameters(), list(model.parameters())):
        with torch.no_grad():
            for one in model.state_dict().values():
                one.fill_(rank)
        hvd.broadcast_parameters(given, root_rank=size - 1)
        for one in model.parameters():
            same(one.detach(), torch.full_like(one, size - 1))
        trained = float(model[1].running_mean[0])
        assert trained == (size - 1 if isinstance(given, dict) else rank)
    refused(ValueError, "invalid params", hvd.broadcast_parameters, 3, 0)
    refused(ValueError, "as 'a'", hvd.broadcast_parameters, {"a": 1}, 0)


def states(rank, size):
    """Optimizers of which some have worked and others have not."""
    hvd.init()
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {}),
                          (torch.optim.Adam, {"amsgrad": True}), (torch.optim.RMSprop, {})):
        for worked in (range(size), [0], [1], []):
            parameters = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
            optimizer = kind(parameters, lr=0.1 * (rank + 1), **options)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for _ in range((rank + 1) * (rank in worked)):
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, rank + 1.0)
                optimizer.step()
                schedule.step()
            before = [one.detach().clone() for one in parameters]
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for one, old in zip(parameters, before):
                same(one.detach(), old)  # it is no step
            said = hvd.allgather_object(optimizer.state_dict())
            words = [str(one) for one in said]
            assert words == words[:1] * size, words
            rate = 0.1 * 0.5 ** (1 if 0 in worked else 0)
            assert abs(optimizer.param_groups[0]["lr"] - rate) < 1e-9
            # It works on.
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    refused(ValueError, "LBFGS", hvd.broadcast_optimizer_state,
            torch.optim.LBFGS([torch.ones(1, requires_grad=True)]), 0)
    many = [torch.nn.Parameter(torch.ones(1)) for _ in range(1 + rank)]
    if rank == 0:
        hvd.broadcast_optimizer_state(torch.optim.SGD(many, 0.1), 0)
    else:
        refused(ValueError, "on rank 0", hvd.broadcast_optimizer_state,
                torch.optim.SGD(many, 0.1), 0)


def normalisation(rank, size):
    """Batches of different sizes give what one batch of all gives."""
    hvd.init()
    torch.manual_seed(3)
    for shape, affine in (((3, 4, 4), True), ((3,), False), ((3, 5), True)):
        batches = [torch.randn(r + 2, *shape) * (r + 1) + 100 for r in range(size)]
        weights = [torch.randn_like(one) for one in batches]
        ours, one = hvd.SyncBatchNorm(3, affine=affine), None
        kinds = {1: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm2d}
        theirs = kinds[len(shape)](3, affine=affine)
        if affine:
            for norm in (ours, theirs):
                torch.nn.init.constant_(norm.weight, 1.5)
                torch.nn.init.constant_(norm.bias, 0.25)
        for _ in range(2):
            own = batches[rank].clone().requires_grad_()
            whole = torch.cat(batches).requires_grad_()
            result = ours(own)
            (result * weights[rank]).sum().backward()
            expected = theirs(whole)
            (expected * torch.cat(weights)).sum().backward()
            first = sum(len(batches[r]) for r in range(rank))
            mine = slice(first, first + len(own))
            torch.testing.assert_close(result, expected[mine], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(own.grad, whole.grad[mine], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean)
        torch.testing.assert_close(ours.running_var, theirs.running_var)
        assert ours.num_batches_tracked == theirs.num_batches_tracked
        if affine:
            got = hvd.allreduce(ours.weight.grad, op=hvd.Sum)
            torch.testing.assert_close(got, theirs.weight.grad, rtol=1e-4, atol=1e-3)
            got = hvd.allreduce(ours.bias.grad, op=hvd.Sum)
            torch.testing.assert_close(got, theirs.bias.grad, rtol=1e-4, atol=1e-3)
        ours.eval(), theirs.eval()
        torch.testing.assert_close(ours(batches[0]), theirs(batches[0]))
    refused(ValueError, "2D", ours.train(), torch.ones(3))


def refusals(_rank, _size):
    hvd.init()
    parameter = torch.nn.Parameter(torch.ones(1))
    plain = torch.optim.SGD([parameter], 0.1)
    refused(NotImplementedError, "does not offer Adasum", hvd.allreduce, torch.ones(1),
            op=hvd.Adasum)
    refused(NotImplementedError, "does not offer Adasum", hvd.DistributedOptimizer, plain,
            op=hvd.Adasum)
    for call in (hvd.elastic.run, hvd.elastic.init, hvd.elastic.TorchState,
                 hvd.elastic.ElasticSampler):
        refused(NotImplementedError, "does not add or remove ranks", call, None)
    refused(NotImplementedError, "comm", hvd.init, [0])
    assert not (hvd.mpi_built() or hvd.mpi_enabled() or hvd.gloo_built() or hvd.gloo_enabled())
    assert hvd.nccl_built() == 0 and not (hvd.cuda_built() or hvd.rocm_built())
    assert not (hvd.ddl_built() or hvd.ccl_built())
    refused(ValueError, "MPI", hvd.mpi_threads_supported)
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
    refused(ImportError, "torch only", hvd.check_extension, "horovod.tensorflow", "X", __file__)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        hvd.start_timeline("/nowhere/timeline.json")
        hvd.stop_timeline()
    assert len(said) == 1 and "WEFT_TRACE" in str(said[0].message), said


def lose_a_rank(rank, _size):
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    refused(hvd.HorovodInternalError, "rank 1", hvd.allreduce, torch.ones(1), name="lost")
    # Whoever calls more is told the same at once.
    refused(hvd.HorovodInternalError, "rank 1", hvd.allreduce, torch.ones(1))
    return time.monotonic() - began


def end_without_a_word(rank, _size):
    """Programs end as they are, whatever is left."""
    hvd.init()
    handles = [hvd.allreduce_async(torch.ones(10)) for _ in range(3)]
    hvd.synchronize(handles[0])
    if rank == 0:
        hvd.allreduce_async(torch.ones(1), name="of one rank")


class Interface(unittest.TestCase):
    def listed(self):
        with open(os.path.join(HERE, "horovod_api.txt")) as lines:
            for line in lines.read().splitlines():
                name, _, words = line.partition("(")
                name, _, value = name.partition(" = ")
                names = words.rstrip(")").split(", ") if words.strip(")") else []
                yield name, value, names if "(" in line else None

    def find(self, name):
        thing = hvd
        if name.startswith("DistributedOptimizer."):  # what it returns has
            name = name.removeprefix("DistributedOptimizer.")
            thing = importlib.import_module("weft.torch.horovod._optimizer")._DistributedOptimizer
        for word in name.split("."):
            thing = getattr(thing, word)
        return thing

    def test_has_all_names_and_parameters_of_horovod(self):
        count = 0
        for name, value, names in self.listed():
            with self.subTest(name=name):
                thing = self.find(name)
                count += 1
                if value:
                    self.assertEqual(thing, int(value))
                if names is None:
                    continue
                self.assertTrue(inspect.getdoc(thing), "says nothing of itself")
                ours = [one for one in inspect.signature(thing).parameters.values()
                        if one.name != "self"]
                stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
                words = [stars.get(one.kind, "") + one.name for one in ours]
                self.assertEqual(words[:len(names)], names)
                for more in ours[len(names):]:
                    self.assertIsNot(more.default, inspect.Parameter.empty)
        self.assertGreater(count, 100)

    def test_offers_what_is_listed_and_no_more(self):
        top = {name.split(".")[0] for name, _, _ in self.listed()}
        self.assertEqual(set(hvd.__all__), top)

    def test_defaults_are_those_of_horovod(self):
        said = str(inspect.signature(hvd.DistributedOptimizer))
        for words in ("backward_passes_per_step: 'int' = 1", "op: 'int' = 0",
                      "gradient_predivide_factor: 'float' = 1.0", "num_groups: 'int' = 0",
                      "sparse_as_dense: 'bool' = False", "= global_process_set",
                      "NoneCompressor"):
            self.assertIn(words, said)
        for call in (hvd.reducescatter, hvd.grouped_reducescatter_async):
            self.assertEqual(inspect.signature(call).parameters["op"].default, hvd.Average)
        for call in (hvd.allreduce, hvd.grouped_allreduce_async_):
            parameters = inspect.signature(call).parameters
            self.assertIsNone(parameters["op"].default)
            self.assertIsNone(parameters["average"].default)


class Ranks(unittest.TestCase):
    def on(self, sizes, body, **options):
        for size in sizes:
            with self.subTest(ranks=size):
                answers(run_ranks(size, body, size, **options))

    def test_places(self):
        self.on((1, 3), places)

    def test_beside_torch(self):
        for backend in ("weft", "gloo"):
            with self.subTest(backend=backend):
                answers(run_ranks(2, beside_torch, 2, backend))

    def test_sums(self):
        self.on((2, 3), sums)

    def test_moves(self):
        self.on((2, 3), moves)

    def test_gradients(self):
        self.on((2, 3), gradients)

    def test_any_order_and_what_does_not_fit(self):
        self.on((2, 3), order)

    def test_names_that_differ(self):
        self.on((2,), names_that_differ, environment={"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"})

    def test_join(self):
        self.on((2, 3), uneven)

    def test_process_sets(self):
        self.on((3,), sets)

    def test_objects_and_parameters(self):
        self.on((2,), objects)

    def test_states_of_optimizers(self):
        self.on((2,), states)

    def test_batch_normalisation(self):
        self.on((1, 3), normalisation)

    def test_what_is_not_offered_says_so(self):
        self.on((1,), refusals)

    def test_a_rank_that_dies_is_named(self):
        ranks = run_ranks(3, lose_a_rank, 3)
        self.assertEqual(ranks[1].status, -signal.SIGKILL)
        for seconds in answers([ranks[0], ranks[2]]):
            self.assertLess(seconds, 5)

    def test_programs_end_whatever_is_left(self):
        for rank in run_ranks(2, end_without_a_word, 2):
            self.assertEqual(rank.status, 0, rank)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
