#!/usr/bin/env python3
"""A model that weft is attached to trains as DDP over Gloo does, bit for bit, under any plan."""

import contextlib
import copy
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import answers, run_ranks
from train_test import Convolutional, Transformer

# Many small buckets, cut and sent a few at a time, first layers first.
SMALL = {"weft_plan": 1, "name": "small", "partition": "4KiB", "credit": "8KiB", "order": "layer",
         "bucket_rule": {"first": "4KiB", "size": "4KiB", "may_exceed": False},
         "barrier": "tensor", "lanes": 2, "chunk": "4KiB", "algorithm": [{"use": "auto"}]}
ALL_AT_ONCE = {**SMALL, "name": "all", "barrier": "all"}


class Odd(torch.nn.Module):
    """Frozen, shared and unused parameters of several types, and one that only one rank uses."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.halved = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        self.doubled = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.doubled.bias.requires_grad_(False)
        self.again = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.again.weight = self.doubled.weight
        self.sometimes = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.never = torch.nn.Linear(3, 3)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.uses = False

    def forward(self, x):
        x = self.halved(self.first(x).bfloat16()).double()
        x = self.again(torch.tanh(self.doubled(x))) * self.scale
        return (self.sometimes(x) if self.uses else x).float()

    def batch(self):
        return torch.randn(4, 6)


MODELS = {"convolutional": Convolutional, "transformer": Transformer, "odd": Odd}


def adamw(parameters):
    return torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01)


class Run:
    """A model in training, and what it is after some steps."""

    def __init__(self, rank, model, plan, optimizer, plain=False, **options):
        self.rank = rank
        torch.manual_seed(1)
        self.model = MODELS[model]()
        self.parallel = DistributedDataParallel(self.model, bucket_cap_mb=0.01, **options)
        self.optimizer = optimizer(self.parallel.parameters())
        self.attachment = None
        if dist.get_backend() == "weft" and not plain:
            self.attach(plan)
        torch.manual_seed(100 + rank)
        self.losses = []

    def attach(self, plan=None):
        from weft import torch as weft_torch

        self.attachment = weft_torch.attach(self.parallel, self.optimizer, plan)

    def backward(self, scale=1.0):
        loss = torch.nn.functional.cross_entropy(self.parallel(self.model.batch()),
                                                 torch.randint(8, (4,)))
        (loss * scale).backward()
        self.losses.append(loss.item())

    def step(self):
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def says(self):
        state = {**self.parallel.state_dict(),
                 **{f"{number}.{name}": value
                    for number, one in self.optimizer.state_dict()["state"].items()
                    for name, value in one.items()}}
        digest = hashlib.sha256()
        for name, value in sorted(state.items()):
            digest.update(name.encode())
            if isinstance(value, torch.Tensor):
                value = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            digest.update(value if isinstance(value, bytes) else repr(value).encode())
        return {"losses": self.losses, "state": digest.hexdigest()}


def plain_steps(run):
    for _ in range(5):
        run.step()


def accumulation(run):
    for _ in range(3):
        run.optimizer.zero_grad()
        with run.parallel.no_sync():
            run.backward()
            run.backward()
        run.backward()
        run.optimizer.step()
    # Never set to nothing: what is there is added to.
    run.backward()
    run.optimizer.step()
    run.backward()
    run.optimizer.step()


def clipping(run):
    for _ in range(4):
        run.optimizer.zero_grad()
        run.backward(scale=100.0)
        run.losses.append(torch.nn.utils.clip_grad_norm_(run.parallel.parameters(), 0.5).item())
        run.optimizer.step()


def scheduling(run):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.5)
    for _ in range(4):
        run.step()
        scheduler.step()


def other_orders(run):
    """Gradients and parameters that are read or emptied at unusual times."""
    for way in range(4):
        loss = torch.nn.functional.cross_entropy(run.parallel(run.model.batch()),
                                                 torch.randint(8, (4,)))
        run.optimizer.zero_grad(set_to_none=way % 2 == 0)
        loss.backward()
        run.optimizer.step()
        some = list(run.model.parameters())
        run.losses.append(some[way].detach().sum().item())
        run.losses.append(some[-1].grad.double().sum().item())
        with torch.no_grad():
            some[0].add_(0.25)
        run.losses.append(float(torch.optim.swa_utils.get_ema_multi_avg_fn(0.5) is not None))
    twin = copy.deepcopy(run.model)
    run.losses.append(sum(p.double().sum().item() for p in twin.parameters()))


def checkpoints(run):
    for _ in range(2):
        run.step()
    saved = io.BytesIO()
    torch.save({"model": run.parallel.state_dict(), "optimizer": run.optimizer.state_dict(),
                "random": torch.get_rng_state()}, saved)
    for _ in range(2):
        run.step()
    saved.seek(0)
    state = torch.load(saved)
    run.parallel.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    for _ in range(2):
        run.step()
    assert run.losses[2:4] == run.losses[4:6], run.losses


def scaling(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(5):
        run.optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(run.parallel(run.model.batch()),
                                                 torch.randint(8, (4,)))
        scaler.scale(loss * (float("inf") if number == 2 else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        run.losses.append(scaler.get_scale())


def closures(run):
    def closure():
        run.optimizer.zero_grad()
        run.backward()
        return run.losses[-1]

    for _ in range(3):
        run.optimizer.step(closure)


def sometimes_used(run):
    for number in range(5):
        run.model.uses = (number + run.rank) % 3 == 0
        run.step()
    assert run.model.never.weight.grad is None


def contexts(run):
    """Updates that come in the middle of what changes the meaning of operations."""
    for _ in range(2):
        run.step()
        run.model.eval()
        with torch.inference_mode():
            run.losses.append(run.parallel(run.model.batch()).double().sum().item())
        run.model.train()
        run.step()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.parallel(run.model.batch())


def detaching(run):
    for _ in range(3):
        for _ in range(2):
            run.step()
        if run.attachment:
            run.attachment.detach()
        for _ in range(2):
            run.step()
        if run.attachment:
            run.attach()


EVERY_OPTIMIZER = {
    "SGD": {"lr": 0.05}, "Adam": {"lr": 1e-2}, "AdamW": {"lr": 1e-2, "amsgrad": True},
    "Adagrad": {"lr": 1e-2}, "Adadelta": {"lr": 0.5}, "Adamax": {"lr": 1e-2}, "NAdam": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2}, "RMSprop": {"lr": 1e-2, "momentum": 0.9}, "Rprop": {"lr": 1e-2},
    "ASGD": {"lr": 1e-2}, "Adafactor": {"lr": 1e-2}}


def named(name):
    options = EVERY_OPTIMIZER[name]
    return lambda parameters: getattr(torch.optim, name)(list(parameters), **options)


def groups(parameters):
    some = list(parameters)
    return torch.optim.Adam([{"params": some[::2], "lr": torch.tensor(1e-2), "foreach": False},
                             {"params": some[1::2], "lr": 1e-3, "fused": True}])


# name: model, plan, optimizer, what is done; options of DDP
COURSES = {
    "convolutional, default plan": ("convolutional", "default", momentum, plain_steps),
    "convolutional, plan of ddp": ("convolutional", "ddp", adamw, plain_steps),
    "convolutional, small": ("convolutional", SMALL, momentum, plain_steps),
    "transformer, default plan": ("transformer", "default", adamw, plain_steps),
    "transformer, plan of horovod": ("transformer", "horovod", adamw, plain_steps),
    "transformer, small": ("transformer", SMALL, adamw, plain_steps),
    "transformer, small, all": ("transformer", ALL_AT_ONCE, momentum, plain_steps),
    "groups": ("transformer", SMALL, groups, scheduling),
    "accumulation": ("transformer", SMALL, momentum, accumulation),
    "accumulation, all": ("convolutional", ALL_AT_ONCE, momentum, accumulation),
    "clipping": ("convolutional", SMALL, momentum, clipping),
    "scheduling": ("convolutional", SMALL, momentum, scheduling),
    "other orders": ("transformer", SMALL, momentum, other_orders),
    "checkpoints": ("transformer", SMALL, adamw, checkpoints),
    "scaling": ("convolutional", SMALL, momentum, scaling),
    "closures": ("convolutional", SMALL, momentum, closures),
    "contexts": ("convolutional", SMALL, adamw, contexts),
    "detaching": ("convolutional", SMALL, momentum, detaching),
    "sometimes used": ("odd", SMALL, adamw, sometimes_used, {"find_unused_parameters": True}),
    "sometimes used, all": ("odd", "ddp", adamw, sometimes_used, {"find_unused_parameters": True}),
    **{f"optimizer {name}": ("transformer", SMALL, named(name), plain_steps)
       for name in EVERY_OPTIMIZER if hasattr(torch.optim, name)},
}


@contextlib.contextmanager
def group_of(backend, rank, size, folder, number, plan=None):
    """A process group of its own, as each course needs one."""
    os.environ.pop("WEFT_PLAN", None)
    if isinstance(plan, dict):
        path = f"{folder}/plan-{number}-{rank}.json"
        with open(path, "w") as out:
            json.dump(plan, out)
        os.environ["WEFT_PLAN"] = path
    elif plan:
        os.environ["WEFT_PLAN"] = plan
    dist.init_process_group(backend, init_method=f"file://{folder}/{backend}-{number}", rank=rank,
                            world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_courses(rank, size, backend, folder, names):
    out = {}
    for number, name in enumerate(names):
        model, plan, optimizer, body, *options = COURSES[name]
        with group_of(backend, rank, size, folder, number, plan):
            run = Run(rank, model, plan, optimizer, **(options[0] if options else {}))
            body(run)
            out[name] = run.says()
            if run.attachment:
                out[name]["late"] = run.attachment.late
    return out


class Courses(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-attach-")

    def tearDown(self):
        shutil.rmtree(self.folder)

    def run_all(self, size, backend, names):
        return answers(run_ranks(size, run_courses, size, backend, self.folder, names, limit=200))

    def test_ends_where_gloo_ends(self):
        names = sys.argv[1:] or list(COURSES)
        ours, theirs = (self.run_all(2, backend, names) for backend in ("weft", "gloo"))
        for name in names:
            with self.subTest(course=name):
                plan = COURSES[name][1]
                for rank in range(2):
                    late = ours[rank][name].pop("late")
                    self.assertEqual(late, plan == "default" or plan == SMALL)
                    self.assertEqual(ours[rank][name], theirs[rank][name])


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:]:
        unittest.main(argv=sys.argv[:1])
    unittest.main()
