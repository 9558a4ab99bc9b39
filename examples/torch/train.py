"""Data-parallel training of a real model with PyTorch, for weft or any other backend.

    torchrun --nproc_per_node 2 train.py --model transformer
    WEFT_TRACE=run1 weft run -n 2 -- python train.py && weft report run1 -o run1.html
    weft loop -o loop1 -- torchrun --nproc_per_node 2 train.py

The data are made up, and are the same in every run. With WEFT_TRACE set, what the training does is
recorded, by the name of each module; that needs no line here. Over weft the gradients go by the
job's plan (WEFT_PLAN), which is what attach() does; with --ddp they go as DDP has them.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Block(torch.nn.Module):
    """Two convolutions, and what came in beside them."""

    def __init__(self, width, out, stride):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.norm1 = torch.nn.BatchNorm2d(out)
        self.conv2 = torch.nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = torch.nn.BatchNorm2d(out)
        self.beside = torch.nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, images):
        inner = torch.relu(self.norm1(self.conv1(images)))
        return torch.relu(self.norm2(self.conv2(inner)) + self.beside(images))


class Convolutional(torch.nn.Module):
    """A small residual network for images of 32 x 32."""

    def __init__(self, width=32):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, width, 3, padding=1)
        self.blocks = torch.nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2),
            Block(4 * width, 8 * width, 2))
        self.head = torch.nn.Linear(8 * width, 10)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))

    @staticmethod
    def sample(chance):
        return torch.randn(3, 32, 32, generator=chance), int(torch.randint(10, (), generator=chance))


class Transformer(torch.nn.Module):
    """A small language model: it guesses the next of 2,000 words."""

    WORDS, LENGTH = 2000, 64

    def __init__(self, width=256, layers=4):
        super().__init__()
        self.words = torch.nn.Embedding(self.WORDS, width)
        self.places = torch.nn.Parameter(0.02 * torch.randn(self.LENGTH, width))
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True,
                                                 norm_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, self.WORDS)

    def forward(self, words):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(self.LENGTH)
        return self.head(self.norm(self.layers(self.words(words) + self.places, mask)))

    @classmethod
    def sample(cls, chance):
        words = torch.randint(cls.WORDS, (cls.LENGTH + 1,), generator=chance)
        return words[:-1], words[1:]


class Perceptron(torch.nn.Module):
    """Six wide layers, 25 million parameters: much to send, and little to compute."""

    def __init__(self, width=2048, layers=6):
        super().__init__()
        self.hidden = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 10)

    def forward(self, values):
        for layer in self.hidden:
            values = torch.relu(layer(values))
        return self.head(values)

    @staticmethod
    def sample(chance):
        return torch.randn(2048, generator=chance), int(torch.randint(10, (), generator=chance))


MODELS = {"convolutional": Convolutional, "transformer": Transformer, "perceptron": Perceptron}


class Samples(torch.utils.data.Dataset):
    """Made up where they are asked for, as a reader of files would."""

    def __init__(self, kind, count, rank):
        self.kind, self.count, self.rank = kind, count, rank

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.kind.sample(torch.Generator().manual_seed(1000 * index + self.rank))


def step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    outputs = model(inputs)
    loss = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="convolutional")
    parser.add_argument("--backend", default="weft")
    parser.add_argument("--ddp", action="store_true", help="leave gradients to DDP")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each rank")
    return parser.parse_args()


def train(given, rank, model, optimizer):
    samples = Samples(MODELS[given.model], given.steps * given.batch, rank)
    times = []
    for inputs, targets in torch.utils.data.DataLoader(samples, given.batch):
        began = time.perf_counter()
        loss = step(model, optimizer, inputs, targets)
        times.append(time.perf_counter() - began)
    times.sort()
    print(f"rank {rank}: {given.steps} steps, {1e3 * times[len(times) // 2]:.1f} ms in the median, "
          f"loss {loss.item():.4f}", flush=True)


def main():
    given = options()
    torch.set_num_threads(given.threads)
    dist.init_process_group(given.backend)
    torch.manual_seed(1)
    model = DistributedDataParallel(MODELS[given.model]())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if given.backend == "weft" and not given.ddp:
        import weft.torch

        weft.torch.attach(model, optimizer)
    train(given, dist.get_rank(), model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
