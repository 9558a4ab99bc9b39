#!/usr/bin/env python3
"""What torch shards, splits and pipelines gives over weft what it gives over Gloo."""

import os
import re
import subprocess
import sys
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from support import answers, free_port, run_ranks

EXAMPLES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/torch")


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 24), torch.nn.LayerNorm(24), torch.nn.ReLU(),
                               torch.nn.Linear(24, 8))


def train(net, optimizer, rank):
    torch.manual_seed(100 + rank)
    for _ in range(4):
        optimizer.zero_grad()
        net(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()


def whole(net):
    """All parameters, wherever their parts are."""
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return torch.cat([one.detach().flatten() for one in full]).tolist()


def sharded(rank, size):
    net = fully_shard(model(), mesh=init_device_mesh("cpu", (size,)))
    train(net, torch.optim.AdamW(net.parameters(), 1e-2), rank)
    return whole(net)


def sharded_and_replicated(rank, size):
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    net = fully_shard(model(), mesh=mesh)
    train(net, torch.optim.AdamW(net.parameters(), 1e-2), rank)
    return whole(net)


def zero(rank, _size):
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    train(net, optimizer, rank)
    optimizer.consolidate_state_dict(0)
    states = optimizer.state_dict()["state"] if rank == 0 else {}
    return whole(net) + [states[name]["exp_avg"].sum().item() for name in sorted(states)]


def distributed_tensors(_rank, size):
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(4)
    one, other = (distribute_tensor(torch.randn(7, 7), mesh, [Shard(dim)]) for dim in (0, 1))
    product = one @ other
    results = [product, product.redistribute(mesh, [Shard(1)]), one.redistribute(mesh, [Shard(1)]),
               (one.redistribute(mesh, [Replicate()]) + other).sum(0)]
    return torch.cat([result.full_tensor().flatten() for result in results]).tolist()


def checkpoints(rank, size, folder):
    mesh = init_device_mesh("cpu", (size,))
    net = fully_shard(model(), mesh=mesh)
    train(net, torch.optim.SGD(net.parameters(), 0.1), rank)
    checkpoint.save(get_model_state_dict(net), checkpoint_id=folder)
    other = fully_shard(model(), mesh=mesh)
    states = get_model_state_dict(other)
    checkpoint.load(states, checkpoint_id=folder)
    set_model_state_dict(other, states)
    assert whole(other) == whole(net) != whole(model())
    return whole(other)


def run(rank, backend, kind, size, *given):
    dist.init_process_group(backend)
    result = kind(rank, size, *given)
    dist.destroy_process_group()
    return result


def example(name, backend, size):
    """What each rank of an example says of its parameters and losses."""
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, os.path.join(EXAMPLES, name), "--backend", backend, "--steps", "4"],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    said = []
    try:
        for rank in ranks:
            out, words = rank.communicate(timeout=240)
            if rank.returncode != 0:
                raise AssertionError(words)
            said.append(re.search(r"parameters .*", out)[0])
    finally:
        for rank in ranks:
            rank.kill()
    return said


class Parallel(unittest.TestCase):
    def compare(self, kind, size, *given):
        # Of many ranks on few cores each has little of a core.
        ours, theirs = (answers(run_ranks(size, run, backend, kind, size, *given, limit=240))
                        for backend in ("weft", "gloo"))
        if size == 2:
            # Of two ranks there is one order in which to add.
            self.assertEqual(ours, theirs)
            return
        for one, other in zip(ours, theirs):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other))

    def test_fully_sharded(self):
        for size in (2, 4):
            self.compare(sharded, size)

    def test_sharded_and_replicated(self):
        self.compare(sharded_and_replicated, 4)

    def test_sharded_optimizer(self):
        for size in (2, 4):
            self.compare(zero, size)

    def test_distributed_tensors(self):
        for size in (2, 4):
            self.compare(distributed_tensors, size)

    def test_checkpoints(self):
        for size in (2, 4):
            with tempfile.TemporaryDirectory() as folder:
                self.compare(checkpoints, size, folder)

    def test_examples(self):
        for name in ("pipeline.py", "tensor_parallel.py"):
            with self.subTest(example=name):
                ours, theirs = (example(name, backend, 2) for backend in ("weft", "gloo"))
                self.assertEqual(ours, theirs)
                self.assertNotEqual(ours[0], "")


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
