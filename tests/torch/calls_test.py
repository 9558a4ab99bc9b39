#!/usr/bin/env python3
"""What torch's own tests of process groups do not ask: types, sizes, tags, joining, models."""

import datetime
import os
import tempfile
import unittest

import torch
import torch.distributed as dist

from support import answers, run_ranks


def same(ours, theirs):
    if not torch.equal(ours, theirs):
        raise AssertionError(f"{ours} instead of {theirs}")


def types(rank, size):
    dist.init_process_group("weft")
    for dtype in (torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
                  torch.float64, torch.uint16, torch.uint32, torch.complex64, torch.complex128):
        ours = torch.tensor([rank + 1, 2 * rank, 3]).to(dtype)
        dist.all_reduce(ours)
        sums = [size * (size + 1) // 2, size * (size - 1), 3 * size]
        same(ours, torch.tensor(sums).to(dtype))
        lists = [torch.zeros(2, dtype=dtype) for _ in range(size)]
        dist.all_gather(lists, torch.tensor([rank, rank + 1]).to(dtype))
        for other, got in enumerate(lists):
            same(got, torch.tensor([other, other + 1]).to(dtype))
    # A bool stays one, whatever is done to it.
    for op, expected in ((dist.ReduceOp.SUM, [True, True, False]),
                         (dist.ReduceOp.MIN, [False, True, False]),
                         (dist.ReduceOp.PRODUCT, [False, True, False]),
                         (dist.ReduceOp.BXOR, [True, size % 2 == 1, False])):
        ours = torch.tensor([rank == 0, True, False])
        dist.all_reduce(ours, op)
        same(ours, torch.tensor(expected))
        same(ours.view(torch.uint8), torch.tensor(expected).view(torch.uint8))
    small = torch.zeros(3, dtype=torch.float8_e4m3fn)
    small[0] = 1.0 if rank == 0 else 0.0
    dist.broadcast(small, 0)
    same(small.float(), torch.tensor([1.0, 0, 0]))
    for tensor, op in ((small, dist.ReduceOp.SUM), (torch.ones(1, dtype=torch.uint32),
                                                    dist.ReduceOp.MAX)):
        try:
            dist.all_reduce(tensor, op)
        except TypeError as refused:
            assert "cannot combine" in str(refused), refused
        else:
            raise AssertionError("a sum without meaning was made")
    for dtype in (torch.float32, torch.float64):
        ours = torch.full((5,), float(rank), dtype=dtype)
        dist.all_reduce(ours, dist.ReduceOp.AVG)
        same(ours, torch.full((5,), (size - 1) / 2, dtype=dtype))
        out = torch.zeros(3, dtype=dtype)
        dist.reduce_scatter_tensor(out, torch.arange(3.0 * size, dtype=dtype) + rank,
                                   dist.ReduceOp.AVG)
        same(out, torch.arange(3.0 * rank, 3.0 * rank + 3, dtype=dtype) + (size - 1) / 2)
        scaled = torch.ones(2, dtype=dtype)
        dist.all_reduce(scaled, dist._make_nccl_premul_sum(0.5))
        same(scaled, torch.full((2,), size / 2, dtype=dtype))
    dist.destroy_process_group()


def layouts(rank, size):
    """Views, transposed tensors, lists that lie in one tensor, and blocks of different sizes."""
    dist.init_process_group("weft")
    whole = torch.zeros(4, 6)
    view = whole.t()[1:3]
    view += rank + 1
    dist.all_reduce(view)
    total = size * (size + 1) / 2
    same(whole[:, 1:3], torch.full((4, 2), total))
    assert whole[:, 0].abs().sum() == 0 and whole[:, 3:].abs().sum() == 0
    # The root's values come into whatever layout the others have.
    for root in range(size):
        ours = torch.full((3, 2), float(rank)).t() if rank != root else torch.arange(6.0).view(2, 3)
        dist.broadcast(ours, root)
        same(ours, torch.arange(6.0).view(2, 3))
        ours = torch.tensor(float(rank))
        dist.broadcast(ours, root)
        same(ours, torch.tensor(float(root)))
    together = torch.zeros(size, 3)
    dist.all_gather(list(together.unbind()), torch.full((3,), float(rank)))
    same(together, torch.arange(float(size)).view(-1, 1).expand(size, 3))
    uneven = [torch.zeros(r) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank,), float(rank)))
    for other, got in enumerate(uneven):
        same(got, torch.full((other,), float(other)))
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, [torch.full((r + 1,), float(r)) for r in range(size)])
    same(out, torch.full((rank + 1,), float(rank * size)))
    sent = [torch.full((rank + other,), float(rank)) for other in range(size)]
    got = [torch.zeros(rank + other) for other in range(size)]
    dist.all_to_all(got, sent)
    for other, tensor in enumerate(got):
        same(tensor, torch.full((rank + other,), float(other)))
    root = [torch.full((2, 2), float(r)).t() for r in range(size)] if rank == 1 else None
    mine = torch.zeros(2, 2).t()
    dist.scatter(mine, root, src=1)
    same(mine, torch.full((2, 2), float(rank)))
    empty = torch.zeros(0)
    dist.all_reduce(empty)
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(20)]
    for work in works:
        work.wait()
        same(work.result()[0] if isinstance(work.result(), list) else work.result(),
             torch.full((3,), float(size)))
    dist.destroy_process_group()


def messages(rank, size):
    dist.init_process_group("weft")
    group = dist.new_group([0, 1])
    if rank == 0:
        dist.isend(torch.full((3,), 1.0), 1, tag=1)
        dist.isend(torch.full((3,), 3.0), 1, group=group, tag=1)
        dist.send(torch.full((3,), 2.0), 1, tag=2)
    if rank == 1:
        for tag, within, expected in ((2, None, 2.0), (1, group, 3.0), (1, None, 1.0)):
            got = torch.zeros(3)
            assert dist.recv(got, 0, tag=tag, group=within) == 0
            same(got, torch.full((3,), expected))
    # From whichever rank: each is heard once, large or small or empty.
    for count in (0, 1, 500000):
        if rank == 0:
            heard = set()
            for _ in range(size - 1):
                got = torch.zeros(count)
                source = dist.recv(got)
                same(got, torch.full((count,), float(source)))
                heard.add(source)
            assert heard == set(range(1, size)), heard
        else:
            dist.send(torch.full((count,), float(rank)), 0)
        dist.barrier()
    right, left = (rank + 1) % size, (rank - 1) % size
    got = [torch.zeros(1000), torch.zeros(1000)]
    ops = [dist.P2POp(dist.isend, torch.full((1000,), float(rank)), right, tag=7),
           dist.P2POp(dist.isend, torch.full((1000,), float(-rank)), left, tag=8),
           dist.P2POp(dist.irecv, got[0], left, tag=7),
           dist.P2POp(dist.irecv, got[1], right, tag=8)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(got[0], torch.full((1000,), float(left)))
    same(got[1], torch.full((1000,), float(-right)))
    dist.destroy_process_group()


def meetings(rank, size, path):
    """Again and again, by every kind of store, and with a group of some ranks over Gloo's."""
    for _ in range(2):
        dist.init_process_group("weft", init_method=f"file://{path}", rank=rank, world_size=size)
        ours = torch.ones(1)
        dist.all_reduce(ours)
        same(ours, torch.tensor([float(size)]))
        dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), size, rank == 0)
    for _ in range(2):
        dist.init_process_group("weft", store=store, rank=rank, world_size=size)
        dist.barrier()
        dist.destroy_process_group()
    del store
    dist.init_process_group("gloo", init_method=f"file://{path}.2", rank=rank, world_size=size)
    pairs = [dist.new_group([0, 1], backend="weft"), dist.new_group([0, size - 1], backend="weft")]
    for members, group in (((0, 1), pairs[0]), ((0, size - 1), pairs[1])):
        if rank in members:
            ours = torch.full((1,), float(rank))
            dist.all_reduce(ours, group=group)
            same(ours, torch.tensor([float(sum(members))]))
    dist.destroy_process_group()


def alone(_rank):
    dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
    ours = torch.ones(2)
    dist.all_reduce(ours)
    gathered = [torch.zeros(2)]
    dist.all_gather(gathered, ours)
    same(gathered[0], torch.ones(2))
    dist.barrier()
    dist.destroy_process_group()


def mesh(rank, size):
    """FSDP2 with averages, tensor parallel by DTensor, and the state of both gathered again."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                   parallelize_module)

    def model():
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))

    torch.manual_seed(5)
    batches = torch.randn(4, size * 2, 8)
    reference = model()
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for batch in batches:
        optimizer.zero_grad()
        reference(batch).square().mean().backward()
        optimizer.step()
    dist.init_process_group("weft")
    shape = init_device_mesh("cpu", (size,))
    sharded = fully_shard(model(), mesh=shape)
    split = parallelize_module(model(), shape, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for net, own in ((sharded, True), (split, False)):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for batch in batches:
            optimizer.zero_grad()
            net(batch.chunk(size)[rank] if own else batch).square().mean().backward()
            optimizer.step()
        for ours, theirs in zip(net.parameters(), reference.parameters()):
            full = ours.full_tensor() if isinstance(ours, DTensor) else ours
            torch.testing.assert_close(full, theirs)
    dist.destroy_process_group()


def split(rank, size):
    dist.init_process_group("weft", device_id=torch.device("cpu", 0))
    halves = [list(range(size // 2)), list(range(size // 2, size))]
    group = dist.split_group(split_ranks=halves, timeout=datetime.timedelta(seconds=60))
    ours = torch.full((1,), float(rank))
    dist.all_reduce(ours, group=group)
    same(ours, torch.tensor([float(sum(halves[rank >= size // 2]))]))
    dist.destroy_process_group()


class Calls(unittest.TestCase):
    def test_all_types(self):
        for size in (2, 3):
            answers(run_ranks(size, types, size))

    def test_all_layouts(self):
        answers(run_ranks(3, layouts, 3))

    def test_messages(self):
        for size in (2, 4):
            answers(run_ranks(size, messages, size))

    def test_meetings(self):
        with tempfile.TemporaryDirectory() as folder:
            answers(run_ranks(3, meetings, 3, f"{folder}/store"))

    def test_a_group_of_one(self):
        answers(run_ranks(1, alone))

    def test_meshes(self):
        answers(run_ranks(2, mesh, 2))

    def test_split_groups(self):
        answers(run_ranks(4, split, 4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
