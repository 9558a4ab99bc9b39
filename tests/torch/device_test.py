#!/usr/bin/env python3
"""Tensors on a device travel as those of the processor do: a device of the project's own.

It is not loaded here but by the ranks: its threads would not outlive a fork.
"""

import datetime
import os
import signal
import time
import unittest

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import answers, run_ranks

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
SLOW = 1_000_000  # microseconds of a copy, where a test has to look before it is done


def same(ours, theirs):
    if not torch.equal(ours, theirs):
        raise AssertionError(f"{ours} instead of {theirs}")


def refused(kind, words, call):
    try:
        call()
    except kind as refusal:
        assert words in str(refusal), refusal
    else:
        raise AssertionError(f"not refused: {words}")


def reductions(device, group, rank, size):
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.complex64, torch.bool,
                  torch.uint16):
        ours = torch.tensor([rank, 1, 2 * rank, 0]).to(dtype).to(device)
        dist.all_reduce(ours, group=group)
        yield ours
    yield from (torch.full((), float(rank), device=device),)
    for op in (AVG, MAX, dist._make_nccl_premul_sum(0.5)):
        ours = torch.arange(6.0).add(rank).to(device)
        dist.all_reduce(ours, op, group=group)
        yield ours
    whole = torch.zeros(4, 6).to(device)
    view = whole.t()[1:3]
    view.copy_(torch.full((2, 4), rank + 1.0))
    dist.all_reduce(view, group=group)
    yield whole
    # Its memory has the numbers of the other sign.
    negative = torch.full((3,), complex(1, rank)).to(device).conj().imag
    assert negative.is_neg()
    out = torch.zeros(3 * size).to(device)
    dist.all_gather_into_tensor(out, negative, group=group)
    yield out
    for root in range(size):
        ours = torch.full((5,), rank + 0.25).to(device)
        dist.reduce(ours, group=group, group_dst=root)
        if rank == root:
            yield ours
        scaled = torch.full((5,), rank + 0.25).to(device)
        dist.reduce(scaled, op=dist._make_nccl_premul_sum(2.0), group=group, group_dst=root)
        if rank == root:
            yield scaled
    for op in (SUM, AVG, dist._make_nccl_premul_sum(4.0)):
        out = torch.zeros(3).to(device)
        dist.reduce_scatter_tensor(out, torch.arange(3.0 * size).add(rank).to(device), op,
                                   group=group)
        yield out
        out = torch.zeros(rank + 1).to(device)
        dist.reduce_scatter(out, [torch.full((r + 1,), rank + 0.5).to(device)
                                  for r in range(size)], op, group=group)
        yield out


def movements(device, group, rank, size):
    for root in range(size):
        ours = torch.full((4, 3), float(rank)).to(device).t()
        dist.broadcast(ours, group=group, group_src=root)
        yield ours
        ours = torch.tensor(float(rank)).to(device)
        dist.broadcast(ours, group=group, group_src=root)
        yield ours
        lists = [torch.zeros(2, 2).to(device).t() for _ in range(size)] if rank == root else None
        dist.gather(torch.full((2, 2), float(rank)).to(device), lists, group=group, group_dst=root)
        yield from lists or []
        lists = [torch.full((3,), float(r)).to(device) for r in range(size)]
        ours = torch.zeros(3).to(device)
        dist.scatter(ours, lists if rank == root else None, group=group, group_src=root)
        yield ours
    lists = [torch.zeros(r).to(device) for r in range(size)]
    dist.all_gather(lists, torch.full((rank,), float(rank)).to(device), group=group)
    yield from lists
    out = torch.zeros(size, 3).to(device)
    dist.all_gather_into_tensor(out, torch.full((1, 3), float(rank)).to(device), group=group)
    yield out
    out = torch.zeros(size).to(device)
    dist.all_to_all_single(out, torch.arange(size * 1.0).add(10 * rank).to(device), group=group)
    yield out
    sent = [rank + other for other in range(size)]
    out = torch.zeros(sum(sent), 2).to(device)
    dist.all_to_all_single(out, torch.full((sum(sent), 2), float(rank)).to(device), sent, sent,
                           group=group)
    yield out
    out = [torch.zeros(rank + other).to(device) for other in range(size)]
    dist.all_to_all(out, [torch.full((rank + other,), float(rank)).to(device)
                          for other in range(size)], group=group)
    yield from out
    empty = torch.zeros(0).to(device)
    dist.all_reduce(empty, group=group)
    yield empty


def messages(device, group, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        dist.send(torch.full((7,), 1.5).to(device), group=group, group_dst=right, tag=3)
    got = torch.zeros(7).to(device)
    dist.recv(got, group=group, group_src=left, tag=3)
    if rank != 0:
        dist.send(got + 1, group=group, group_dst=right, tag=3)
    yield got
    got = torch.zeros(1000).to(device)
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full((1000,), float(rank)).to(device), group=group,
                   group_peer=right),
        dist.P2POp(dist.irecv, got, group=group, group_peer=left)])
    for work in works:
        work.wait()
    yield got


def coalesced(device, group, rank, size):
    many = [torch.full((n,), float(rank)).to(device) for n in (1, 5, 9)]
    with dist._coalescing_manager(group, device=torch.device(device), async_ops=True) as manager:
        for one in many:
            dist.all_reduce(one, group=group)
    manager.wait()
    yield from many
    outs = [torch.zeros(size * n).to(device) for n in (2, 3)]
    with dist._coalescing_manager(group, device=torch.device(device), async_ops=True) as manager:
        for n, out in zip((2, 3), outs):
            dist.all_gather_into_tensor(out, torch.full((n,), float(rank)).to(device), group=group)
    manager.wait()
    yield from outs
    for work in [dist.all_reduce(one, group=group, async_op=True) for one in many]:
        work.wait()
    yield from many
    dist.barrier(group=group)


def compare(group, rank, size):
    for part in (reductions, movements, messages, coalesced):
        theirs = [tensor.clone() for tensor in part("cpu", group, rank, size)]
        ours = [tensor.clone() for tensor in part("testdev", group, rank, size)]
        assert len(ours) == len(theirs) > 0
        for number, (one, other) in enumerate(zip(ours, theirs)):
            assert one.device.type == "testdev", one.device
            if not torch.equal(one.cpu(), other):
                raise AssertionError(f"{part.__name__} {number}: {one.cpu()} instead of {other}")


def everything(rank, size):
    import device

    device.copies_take(200)
    dist.init_process_group("weft")
    compare(None, rank, size)
    members = [0, size - 1]
    group = dist.new_group(members)
    if rank in members:
        compare(group, members.index(rank), len(members))
    dist.destroy_process_group()


def waiting(rank, size):
    """Nobody waits for a copy but those streams that need it, and these do."""
    import device

    dist.init_process_group("weft")
    total = torch.full((1000,), float(sum(range(size))))
    device.copies_take(SLOW)
    # What is on its way to the tensor when it is handed over, and what is on its way back.
    ours = torch.empty(1000, device="testdev").fill_(float(rank))
    work = dist.all_reduce(ours, async_op=True)
    assert not device.is_idle(), "the call waited for what was queued before"
    work.wait()
    assert not work.is_completed(), "wait() waited for the copy back"
    same(ours.cpu(), total)
    assert work.is_completed()
    device.copies_take(20_000)
    # The same by futures, and in what is called then.
    ours.fill_(float(rank))
    done = dist.all_reduce(ours, async_op=True).get_future()
    then = done.then(lambda future: future.value()[0].cpu())
    same(then.wait(), total)
    done.wait()
    same(ours.cpu(), total)
    # Streams of the program's own: handed over on one, waited for on another.
    one, other = torch.Stream("testdev"), torch.Stream("testdev")
    with one:
        ours.fill_(float(rank))
        work = dist.all_reduce(ours, async_op=True)
    with other:
        work.wait()
        same(ours.cpu(), total)
    # Several as one.
    many = [torch.empty(100, device="testdev").fill_(float(rank)) for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("testdev"), async_ops=True) as manager:
        for tensor in many:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor in many:
        same(tensor.cpu(), total[:100])
    # A receive overwrites what was queued before it.
    if rank == 0:
        dist.send(torch.ones(10, device="testdev"), 1)
    elif rank == 1:
        ours = torch.empty(10, device="testdev").fill_(7.0)
        dist.recv(ours, 0)
        same(ours.cpu(), torch.ones(10))
    # What nobody holds any more stays until it was sent.
    out = torch.zeros(size * 1000, device="testdev")
    work = dist.all_gather_into_tensor(out, torch.full((1000,), float(rank), device="testdev"),
                                       async_op=True)
    for _ in range(8):
        dist.all_reduce(torch.full((1000,), 1.0, device="testdev"), async_op=True)
    work.wait()
    same(out.cpu(), torch.arange(float(size)).repeat_interleave(1000))
    dist.destroy_process_group()


def both(rank, size):
    """Operations on both kinds of tensors are started in the order of their calls."""
    import device

    dist.init_process_group("weft")
    device.copies_take(30_000 if rank == 0 else 0)
    for _ in range(3):
        works, results = [], []
        for number in range(6):
            # The ranks need not agree on where a tensor is, either.
            place = "testdev" if (number + rank) % 3 else "cpu"
            tensor = torch.full((number + 1,), float(rank + number)).to(place)
            results.append(tensor)
            works.append(dist.all_reduce(tensor, async_op=True))
        for number, (work, tensor) in enumerate(zip(works, results)):
            work.wait()
            same(tensor.cpu(), torch.full((number + 1,), float(sum(range(size)) + size * number)))
    if rank == 0:
        dist.send(torch.arange(5.0), 1)
        dist.isend(torch.arange(5.0).to("testdev"), 1).wait()
    elif rank == 1:
        for place in ("testdev", "cpu"):
            got = torch.zeros(5).to(place)
            dist.recv(got, 0)
            same(got.cpu(), torch.arange(5.0))
    dist.barrier()
    dist.destroy_process_group()


def refusals(_rank):
    import device  # noqa: F401

    dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
    here, there = torch.ones(2), torch.ones(2, device="testdev:0")
    elsewhere = torch.ones(2, device="testdev:1")
    group = dist.group.WORLD
    refused(ValueError, "allreduce got tensors on cpu and on testdev:0",
            lambda: group._get_backend(torch.device("cpu")).allreduce([here, there]))
    refused(ValueError, "allgather got tensors on testdev:0 and on testdev:1: give it tensors of "
            "one device", lambda: dist.all_gather([elsewhere], there))
    refused(ValueError, "got tensors on", lambda: dist.all_gather_into_tensor(here, there))
    refused(ValueError, "got tensors on", lambda: dist.reduce_scatter_tensor(there, here))
    refused(ValueError, "got tensors on", lambda: dist.all_to_all([here], [there]))
    refused(ValueError, "got tensors on", lambda: dist.scatter(here, [there]))
    refused(RuntimeError, "got a tensor on meta",
            lambda: group._get_backend(torch.device("cpu")).allreduce([torch.ones(2).to("meta")]))
    refused(TypeError, "cannot combine",
            lambda: dist.all_reduce(there.to(torch.uint16), MAX))
    # A second device, and what was refused left nothing behind.
    dist.all_reduce(elsewhere)
    same(elsewhere.cpu(), torch.ones(2))
    dist.all_reduce(there)
    same(there.cpu(), torch.ones(2))
    dist.destroy_process_group()


def memory(_rank):
    """Memory for copies is used again, and no more of it is kept than is written down."""
    import device

    from weft.torch import _C, _backend

    dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
    used = lambda: _C.staging(_backend(None))
    ours = torch.ones(1 << 16, device="testdev")
    for _ in range(20):
        dist.all_reduce(ours)
        device.Module.synchronize()
    dist.barrier()
    once = used()
    assert once["allocations"] <= 3, once
    # In flight at once, more than is kept.
    many = [torch.zeros(16 << 20, device="testdev") for _ in range(5)]
    device.copies_take(5_000)
    for work in [dist.all_reduce(one, async_op=True) for one in many]:
        work.wait()
    same(many[-1][:3].cpu(), torch.zeros(3))
    del many
    device.Module.synchronize()
    dist.all_reduce(ours)
    dist.barrier()
    at_last = used()
    assert 4 <= at_last["allocations"] - once["allocations"] <= 6, at_last
    assert at_last["kept"] <= 256 << 20, at_last
    dist.destroy_process_group()


def lose_a_rank(rank):
    import device

    from weft import torch as weft_torch

    dist.init_process_group("weft")
    ours = torch.ones(1000, device="testdev")
    dist.all_reduce(ours)
    device.copies_take(20_000)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began, said = time.monotonic(), None
    try:
        for _ in range(3):
            dist.all_reduce(ours)
    except RuntimeError as failure:
        said = [type(failure).__name__, str(failure)]
    seconds = time.monotonic() - began
    # What was on its way is told, too.
    again = None
    try:
        dist.all_reduce(ours, async_op=True).get_future().wait()
    except RuntimeError as failure:
        again = str(failure)
    blamed = weft_torch.culprit()
    dist.destroy_process_group()
    return {"said": said, "again": again, "seconds": seconds, "blamed": blamed}


def stuck(rank):
    """A device that does not do what was queued ends the wait of all ranks."""
    import device

    dist.init_process_group("weft", timeout=datetime.timedelta(seconds=3))
    ours = torch.ones(10, device="testdev")
    dist.all_reduce(ours)
    if rank == 0:
        device.copies_take(8_000_000)
        ours.fill_(2.0)
    said = None
    try:
        dist.all_reduce(ours)
    except RuntimeError as failure:
        said = str(failure)
    dist.destroy_process_group()
    return said


def train(rank, place):
    import device

    device.copies_take(100)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.ReLU(),
                                torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = model.to(place)
    dist.init_process_group("weft")
    torch.manual_seed(100 + rank)
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1, foreach=False)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = parallel(torch.randn(8, 16).to(place)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    values = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    dist.destroy_process_group()
    return {"losses": losses, "parameters": values.tolist()}


def attach(_rank):
    import device  # noqa: F401

    from weft import torch as weft_torch

    dist.init_process_group("weft", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(3, 2).to("testdev"))
    refused(ValueError, 'parameter "module.weight" is on testdev:0', lambda: weft_torch.attach(model))
    dist.destroy_process_group()


def beside_gloo(rank, size):
    """Only the device's tensors over weft."""
    import device  # noqa: F401

    from weft import torch as weft_torch

    dist.init_process_group("cpu:gloo,testdev:weft")
    for place in ("cpu", "testdev"):
        ours = torch.full((3,), float(rank)).to(place)
        dist.all_reduce(ours)
        same(ours.cpu(), torch.full((3,), float(sum(range(size)))))
    assert weft_torch.status() and weft_torch.failure() is None
    dist.destroy_process_group()


def ends_at_once(_rank, destroys):
    import device

    device.copies_take(20_000)
    dist.init_process_group("weft")
    for _ in range(4):
        dist.all_reduce(torch.ones(1000, device="testdev"), async_op=True)
    if destroys:
        dist.destroy_process_group()


class Device(unittest.TestCase):
    def test_gives_what_the_processor_gives(self):
        answers(run_ranks(3, everything, 3))

    def test_gives_it_without_streams(self):
        environment = {"WEFT_TEST_DEVICE": "blocking"}
        answers(run_ranks(2, everything, 2, environment=environment))

    def test_gives_it_without_pinned_memory(self):
        environment = {"WEFT_TEST_DEVICE": "unpinned"}
        answers(run_ranks(2, everything, 2, environment=environment))

    def test_is_waited_for_by_those_who_need_it(self):
        answers(run_ranks(2, waiting, 2))

    def test_goes_with_tensors_of_the_processor(self):
        answers(run_ranks(2, both, 2))

    def test_refuses_what_is_mixed(self):
        answers(run_ranks(1, refusals))

    def test_uses_memory_again(self):
        answers(run_ranks(1, memory))

    def test_names_a_rank_that_was_killed(self):
        ranks = run_ranks(3, lose_a_rank)
        for number in (0, 2):
            told = answers([ranks[number]])[0]
            self.assertIsNotNone(told["said"], "the sum came without rank 1")
            self.assertEqual(told["said"][0], "DistNetworkError", told)
            self.assertIn("rank 1", told["said"][1])
            self.assertIn("rank 1", told["again"] or "")
            self.assertEqual(told["blamed"], 1)
            self.assertLess(told["seconds"], 4)

    def test_is_not_waited_for_for_ever(self):
        said = answers(run_ranks(2, stuck))
        self.assertIn("what testdev:0 had queued before the operation did not end", said[0] or "")
        self.assertIn("rank 0", said[1] or "")

    def test_trains(self):
        there, here = (answers(run_ranks(2, train, place)) for place in ("testdev", "cpu"))
        self.assertEqual(there[0]["parameters"], there[1]["parameters"])
        # torch computes the same layers by other operators there.
        for ours, theirs in zip(there, here):
            for what in ("losses", "parameters"):
                torch.testing.assert_close(torch.tensor(ours[what]), torch.tensor(theirs[what]))

    def test_is_refused_by_attach(self):
        answers(run_ranks(1, attach))

    def test_is_served_beside_another_backend(self):
        answers(run_ranks(2, beside_gloo, 2))

    def test_ends_with_the_program(self):
        for destroys in (True, False):
            answers(run_ranks(2, ends_at_once, destroys))


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
