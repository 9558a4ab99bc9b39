#!/usr/bin/env python3
"""Training by DDP over weft is what it is over Gloo, and ends well when a rank does not."""

import datetime
import hashlib
import os
import signal
import time
import unittest

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import answers, run_ranks


class Convolutional(torch.nn.Sequential):
    def __init__(self):
        super().__init__(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.MaxPool2d(2), torch.nn.Conv2d(8, 16, 3, padding=1), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(16 * 8 * 8, 10))

    def batch(self):
        return torch.randn(4, 3, 16, 16)


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 10)

    def forward(self, words):
        return self.head(self.encoder(self.embedding(words)).mean(1))

    def batch(self):
        return torch.randint(50, (4, 12))


MODELS = {"convolutional": Convolutional, "transformer": Transformer}


def prepare(name, backend, rank, **options):
    torch.manual_seed(1)
    model = MODELS[name]()
    dist.init_process_group(backend, **options)
    torch.manual_seed(100 + rank)
    # Several buckets, as a large model has.
    return model, DistributedDataParallel(model, bucket_cap_mb=0.01)


def step(model, parallel, optimizer):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(parallel(model.batch()), torch.randint(10, (4,)))
    loss.backward()
    optimizer.step()
    return loss.item()


def train(rank, name, backend):
    model, parallel = prepare(name, backend, rank)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)
    losses = [step(model, parallel, optimizer) for _ in range(6)]
    with parallel.no_sync():
        step(model, parallel, torch.optim.SGD(parallel.parameters(), 0.0))
    losses.append(step(model, parallel, optimizer))
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    dist.destroy_process_group()
    return {"losses": losses, "parameters": digest, "norm": values.double().norm().item()}


def lose_a_rank(rank, how):
    """Rank 1 ends in mid-step; what the others are told, when, and that they go on living."""
    timeout = datetime.timedelta(seconds=2 if how == "stuck" else 60)
    model, parallel = prepare("convolutional", "weft", rank, timeout=timeout)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    for _ in range(3):
        step(model, parallel, optimizer)
    if rank == 1:
        loss = torch.nn.functional.cross_entropy(parallel(model.batch()), torch.randint(10, (4,)))
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise SystemExit(3)
        time.sleep(6)
        return {"loss": loss.item()}
    began = time.monotonic()
    try:
        step(model, parallel, optimizer)
        said = None
    except RuntimeError as failure:
        said = [type(failure).__name__, str(failure)]
    seconds = time.monotonic() - began
    # Everything after it ends at once with the same reason.
    try:
        dist.barrier()
        again = None
    except RuntimeError as failure:
        again = str(failure)
    from weft import torch as weft_torch

    blamed = weft_torch.culprit()
    dist.destroy_process_group()
    return {"said": said, "again": again, "seconds": seconds, "blamed": blamed}


class Training(unittest.TestCase):
    def test_has_the_parameters_of_gloo(self):
        for name in MODELS:
            with self.subTest(model=name):
                ours, theirs = (answers(run_ranks(2, train, name, b)) for b in ("weft", "gloo"))
                self.assertEqual(ours[0]["parameters"], ours[1]["parameters"])
                # Of two ranks there is one order in which to add.
                self.assertEqual(ours, theirs)

    def test_has_the_parameters_of_gloo_but_for_the_order_of_additions(self):
        ours, theirs = (answers(run_ranks(4, train, "transformer", b)) for b in ("weft", "gloo"))
        self.assertEqual(len({one["parameters"] for one in ours}), 1)
        for one, other in zip(ours, theirs):
            for a, b in zip(one["losses"], other["losses"]):
                self.assertAlmostEqual(a, b, delta=1e-4)
            self.assertAlmostEqual(one["norm"], other["norm"], delta=1e-4 * other["norm"])

    def lost(self, how, kind, within):
        ranks = run_ranks(3, lose_a_rank, how)
        for number in (0, 2):
            told = answers([ranks[number]])[0]
            self.assertIsNotNone(told["said"], "the step succeeded without rank 1")
            self.assertEqual(told["said"][0], kind, told)
            self.assertIn("rank 1", told["said"][1])
            self.assertIn("rank 1", told["again"] or "")
            self.assertEqual(told["blamed"], 1)
            self.assertLess(told["seconds"], within)
        return ranks[1].status

    def test_names_a_rank_that_was_killed(self):
        self.assertEqual(self.lost("killed", "DistNetworkError", 2), -signal.SIGKILL)

    def test_names_a_rank_that_ended(self):
        # It is not waited for in vain: it says itself that it ends, or its connections do.
        self.assertEqual(self.lost_any("raises"), 3)

    def lost_any(self, how):
        ranks = run_ranks(3, lose_a_rank, how)
        for number in (0, 2):
            told = answers([ranks[number]])[0]
            self.assertIsNotNone(told["said"], "the step succeeded without rank 1")
            self.assertIn("rank 1", told["said"][1])
            self.assertLess(told["seconds"], 8)
        return ranks[1].status

    def test_names_a_rank_that_is_stuck(self):
        self.lost("stuck", "DistBackendError", 5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
