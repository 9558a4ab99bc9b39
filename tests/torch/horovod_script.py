#!/usr/bin/env python3
"""A training script as people have written them for Horovod; only its import line is weft's.

    horovod_script.py [--passes N] [--fp16] [--clip] [--adam] [--groups N]

Prints what came of it, as JSON, on each rank.
"""

import argparse
import hashlib
import json

import torch
import torch.nn.functional as F

import weft.torch.horovod as hvd


class Digits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features = torch.nn.Conv2d(1, 4, 3)
        self.hidden = torch.nn.Linear(4 * 3 * 3, 16)
        self.classes = torch.nn.Linear(16, 10)

    def forward(self, images):
        rows = F.max_pool2d(F.relu(self.features(images)), 2).flatten(1)
        return F.log_softmax(self.classes(F.relu(self.hidden(rows))), 1)


class Pictures(torch.utils.data.Dataset):
    """Small pictures of noise, each with the number that it stands for."""

    def __init__(self, count):
        noise = torch.Generator().manual_seed(7)
        self.images = torch.randn(count, 1, 8, 8, generator=noise)
        self.labels = torch.randint(10, (count,), generator=noise)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--passes", type=int, default=1)
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--predivide", type=float, default=1.0)
    parser.add_argument("--groups", type=int)
    return parser.parse_args(words)


def new_optimizer(options, model):
    if options.adam:
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


def train(options):
    hvd.init()
    # Every rank begins with another model: the broadcast makes them one.
    torch.manual_seed(42 + hvd.rank())
    model = Digits()
    data = Pictures(options.epochs * 48)
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank(), shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=options.batch, sampler=sampler)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = new_optimizer(options, model)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16 else hvd.Compression.none,
        backward_passes_per_step=options.passes,
        op=hvd.Average,
        gradient_predivide_factor=options.predivide,
        groups=options.groups)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(options.epochs):
        model.train()
        for number, (images, labels) in enumerate(loader):
            if number % options.passes == 0:
                optimizer.zero_grad()
            loss = F.nll_loss(model(images), labels) / options.passes
            loss.backward()
            if (number + 1) % options.passes:
                continue
            if options.clip:
                optimizer.synchronize()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                optimizer.step()
        schedule.step()
    loss = hvd.allreduce(loss.detach(), name="loss").item()
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
    return {"rank": hvd.rank(), "size": hvd.size(), "loss": loss, "digest": digest,
            "parameters": flat.tolist()}


def train_alone(options, ranks):
    """The same by one process: the batches of all ranks are one."""
    torch.manual_seed(42)
    model, data = Digits(), Pictures(options.epochs * 48)
    optimizer = new_optimizer(options, model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    many = options.batch * ranks * options.passes
    for _ in range(options.epochs):
        for start in range(0, len(data), many):
            optimizer.zero_grad()
            images, labels = data[slice(start, start + many)]
            F.nll_loss(model(images), labels).backward()
            if options.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        schedule.step()
    return torch.cat([one.detach().flatten() for one in model.parameters()])


if __name__ == "__main__":
    outcome = train(arguments())
    del outcome["parameters"]
    print("outcome " + json.dumps(outcome) + "\n", end="", flush=True)
