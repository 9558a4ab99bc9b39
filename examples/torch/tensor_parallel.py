"""Layers that are too wide for one process: each rank has a part of each matrix.

    torchrun --nproc_per_node 2 tensor_parallel.py
    torchrun --nproc_per_node 2 tensor_parallel.py --backend gloo

Attention has its heads, and the layers after it their columns, shared out among the ranks. All see
the same batch, and two sums in each block, one forward and one backward, put the parts together.
"""

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional


class Block(torch.nn.Module):
    """A transformer's; `width` is that of one head times the heads that this rank has."""

    def __init__(self, width, heads):
        super().__init__()
        self.head = width // heads
        self.norm1 = torch.nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(width, width)
                                                      for _ in range(4))
        self.norm2 = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, words):
        inner = self.norm1(words)
        # As many heads as the layer gives: a part of them, where they are shared out.
        heads = [layer(inner).unflatten(-1, (-1, self.head)).transpose(1, 2)
                 for layer in (self.query, self.key, self.value)]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        words = words + self.out(seen.transpose(1, 2).flatten(2))
        return words + self.down(functional.gelu(self.up(self.norm2(words))))


PLAN = {"query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(),
        "out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="weft")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=8)
    return parser.parse_args()


def main():
    given = options()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if given.heads % ranks != 0 or given.width % given.heads != 0:
        raise SystemExit(f"{given.heads} heads of a width of {given.width} cannot be shared out "
                         f"among {ranks} ranks: try --heads")
    # All ranks make the same model, and each keeps its part.
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(Block(given.width, given.heads) for _ in range(given.blocks)))
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model:
        parallelize_module(block, mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    inputs = torch.randn(given.batch, 16, given.width)
    targets = torch.randn(given.batch, 16, given.width)
    times = []
    for _ in range(given.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
    times.sort()
    parts = [getattr(parameter, "_local_tensor", parameter).detach().flatten()
             for parameter in model.parameters()]
    digest = hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16]
    print(f"rank {rank}: {given.steps} steps, {1e3 * times[len(times) // 2]:.1f} ms in the median, "
          f"parameters {digest}, loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
