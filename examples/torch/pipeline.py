"""A model that is too deep for one process: each rank has some of its layers, and passes on.

    torchrun --nproc_per_node 2 pipeline.py
    torchrun --nproc_per_node 4 pipeline.py --layers 8 --backend gloo

A batch is cut into parts, so that all ranks have something to do at once: each rank runs one part
forward, one backward, in turns. What goes from rank to rank are the outputs of layers one way, and
their gradients the other.
"""

import argparse
import hashlib
import time

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, inputs):
        return inputs + self.down(functional.gelu(self.up(self.norm(inputs))))


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="weft")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--parts", type=int, default=4, help="of a batch")
    return parser.parse_args()


def main():
    given = options()
    torch.set_num_threads(1)
    dist.init_process_group(given.backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if given.layers < ranks:
        raise SystemExit(f"{given.layers} layers are too few for {ranks} ranks: try --layers")
    # All ranks make the same model, and each keeps its own layers.
    torch.manual_seed(1)
    layers = [Layer(given.width) for _ in range(given.layers)]
    own = torch.nn.Sequential(*layers[given.layers * rank // ranks:
                                      given.layers * (rank + 1) // ranks])
    stage = PipelineStage(own, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, given.parts, loss_fn=functional.mse_loss)
    optimizer = torch.optim.AdamW(own.parameters(), 1e-3)
    inputs = torch.randn(given.batch, given.width)
    targets = torch.randn(given.batch, given.width)
    times, losses = [], []
    for _ in range(given.steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        if rank == ranks - 1:
            losses = []
            schedule.step(*((inputs,) if ranks == 1 else ()), target=targets, losses=losses)
        else:
            schedule.step(*((inputs,) if rank == 0 else ()))
        optimizer.step()
        times.append(time.perf_counter() - began)
    times.sort()
    values = torch.cat([parameter.detach().flatten() for parameter in own.parameters()])
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
    loss = f", loss {torch.stack(losses).mean().item():.6f}" if losses else ""
    print(f"rank {rank}: {given.steps} steps, {1e3 * times[len(times) // 2]:.1f} ms in the median, "
          f"parameters {digest}{loss}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
