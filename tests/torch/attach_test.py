#!/usr/bin/env python3
"""A model that weft is attached to trains as DDP over Gloo does, bit for bit, under any plan."""

import contextlib
import copy
import datetime
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import torch
import torch._dynamo  # which DDP imports: once here, and not in every rank
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

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


class Recomputing(torch.nn.Module):
    """Forward is done again in backward, in both of torch's ways."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)
        self.middle = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for reentrant, layer in zip((True, False), self.middle):
            x = checkpoint(layer, x, use_reentrant=reentrant)
        return self.last(x)

    def batch(self):
        return torch.randn(4, 6)


def channels_last():
    return Convolutional().to(memory_format=torch.channels_last)


MODELS = {"convolutional": Convolutional, "channels last": channels_last,
          "transformer": Transformer, "odd": Odd, "recomputing": Recomputing}


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

    def attach(self, plan=None, optimizer=True):
        from weft import torch as weft_torch

        self.attachment = weft_torch.attach(self.parallel, self.optimizer if optimizer else None,
                                            plan)

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
    run.optimizer.zero_grad()
    run.backward()
    gradient = run.model.head.bias.grad
    saved = io.BytesIO()
    torch.save(gradient, saved)
    saved.seek(0)
    assert torch.equal(copy.deepcopy(gradient), torch.load(saved))
    run.optimizer.step()
    twin = copy.deepcopy(run.model)
    run.losses.append(sum(p.double().sum().item() for p in twin.parameters()))
    run.step()
    saved = io.BytesIO()
    torch.save(run.model, saved)
    saved.seek(0)
    twin = torch.load(saved, weights_only=False)
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


def left_to_the_end(run):
    """What the last step left for later is read when the group is gone."""
    plain_steps(run)
    dist.destroy_process_group()


def hooks(run):
    """Of somebody else: they find gradients that they may change."""

    def halve(optimizer, _args, _kwargs):
        for parameter in run.parallel.parameters():
            parameter.grad.mul_(0.5)

    run.optimizer.register_step_pre_hook(halve)
    plain_steps(run)


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


class Watching(TorchDispatchMode):
    """What is computed, by those that compute inside it."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


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
        run.step()
        with Watching() as watching:
            run.parallel(run.model.batch())
        assert "aten.convolution.default" in watching.seen, watching.seen
        assert "aten.addcdiv_.default" not in watching.seen, watching.seen  # of AdamW


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


def random_plan(chance, number):
    """One of all that a plan may say of how gradients travel."""
    size = lambda: chance.choice(["4KiB", "16KiB", "64KiB", "1MiB"])
    return {"weft_plan": 1, "name": f"random {number}",
            "partition": chance.choice([None, size()]), "credit": chance.choice([None, size()]),
            "order": chance.choice(["ready", "layer"]),
            "bucket_rule": {"first": size(), "size": size(), "may_exceed": chance.random() < 0.5},
            "barrier": chance.choice(["all", "tensor"]), "lanes": chance.randint(1, 4),
            "chunk": chance.choice(["4KiB", "64KiB", "256KiB"]),
            "algorithm": [{"use": chance.choice(["auto", "ring", "tree", "direct", "doubling"])}]}


def switching(run):
    """Twenty other plans in mid-run."""
    chance = random.Random(7)
    for number in range(20):
        for _ in range(1 + number % 2):
            run.step()
        if run.attachment:
            plan = random_plan(chance, number)
            run.attachment.change_plan(plan)
            assert run.attachment.plan == plan["name"], run.attachment.plan
    run.step()


def refusing_plans(run):
    """Plans that one rank cannot take, or that are not the same: nobody takes them."""
    different = [("horovod", "there is no such plan"), ("ddp", "horovod"), (SMALL, {"lane": 3}),
                 ({"weft_plan": 1, "codec": "onebit"},) * 2]
    for plans in different:
        run.step()
        if not run.attachment:
            continue
        said = ""
        try:
            run.attachment.change_plan(plans[run.rank % 2])
        except ValueError as refused:
            said = str(refused)
        assert "the plan before goes on" in said, said
        assert run.attachment.plan == "default", run.attachment.plan
    run.step()


def not_given(run):
    """By optimizers that weft does not know of, which find sums by looking at gradients."""
    if run.attachment:
        run.attachment.detach()
        run.attach(optimizer=False)
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        run.optimizer = torch.optim.Adam(run.parallel.parameters(), 1e-2, **options)
        run.step()
        run.step()
    run.optimizer = torch.optim.LBFGS(run.parallel.parameters(), 0.1, max_iter=3)
    closures(run)


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
    "hooks": ("convolutional", SMALL, momentum, hooks),
    "closures": ("convolutional", SMALL, momentum, closures),
    "not given": ("convolutional", SMALL, momentum, not_given),
    "contexts": ("convolutional", SMALL, adamw, contexts),
    "channels last": ("channels last", SMALL, momentum, plain_steps),
    "recomputing": ("recomputing", SMALL, momentum, plain_steps),
    "views": ("convolutional", SMALL, momentum, accumulation, {"gradient_as_bucket_view": True}),
    "left to the end": ("convolutional", SMALL, momentum, left_to_the_end),
    "detaching": ("convolutional", SMALL, momentum, detaching),
    "switching": ("transformer", "default", adamw, switching),
    "switching, convolutional": ("convolutional", "default", momentum, switching),
    "refusing plans": ("convolutional", "default", momentum, refusing_plans),
    "sometimes used": ("odd", SMALL, adamw, sometimes_used, {"find_unused_parameters": True}),
    "sometimes used, all": ("odd", "ddp", adamw, sometimes_used, {"find_unused_parameters": True}),
    **{f"optimizer {name}": ("transformer", SMALL, named(name), plain_steps)
       for name in EVERY_OPTIMIZER if hasattr(torch.optim, name)},
}


@contextlib.contextmanager
def group_of(backend, rank, size, folder, number, plan=None, **options):
    """A process group of its own, as each course needs one."""
    os.makedirs(folder, exist_ok=True)
    os.environ.pop("WEFT_PLAN", None)
    if isinstance(plan, dict):
        path = f"{folder}/plan-{number}-{rank}.json"
        with open(path, "w") as out:
            json.dump(plan, out)
        os.environ["WEFT_PLAN"] = path
    elif plan:
        os.environ["WEFT_PLAN"] = plan
    dist.init_process_group(backend, init_method=f"file://{folder}/{backend}-{number}", rank=rank,
                            world_size=size, **options)
    yield
    if dist.is_initialized():
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


def refusals(rank, folder):
    """What is said of what cannot be done; in the end a step is left incomplete."""
    from weft import torch as weft_torch

    said = {}

    def tells(name, kind, do):
        try:
            do()
        except kind as refused:
            said[name] = str(refused)
        else:
            raise AssertionError(f"{name} was not refused")

    attach = weft_torch.attach
    with group_of("gloo", rank, 2, folder, 0):
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        tells("gloo", ValueError, lambda: attach(model))
    with group_of("weft", rank, 2, folder, 1, "ddp"):
        run = Run(rank, "odd", None, momentum, plain=True)
        parallel = run.parallel
        tells("module", TypeError, lambda: attach(run.model))
        tells("optimizer", TypeError, lambda: attach(parallel, torch.optim.SGD))
        tells("plan", ValueError, lambda: attach(parallel, plan="default"))
        tells("wrong plan", ValueError, lambda: attach(parallel, plan={"weft_plan": 1, "lane": 3}))
        tells("not attached", ValueError, lambda: weft_torch.synchronize(parallel))
        parallel.static_graph = True  # as if it had been made so, which takes seconds
        tells("static graph", ValueError, lambda: attach(parallel))
        parallel.static_graph = False
        tells("sparse", ValueError, lambda: attach(
            DistributedDataParallel(torch.nn.Embedding(2, 2, sparse=True))))
        from weft.torch._attach import _goes_past_python

        assert not _goes_past_python(run.model)
        assert _goes_past_python(torch.nn.Sequential(torch.jit.script(torch.nn.Linear(1, 1))))
        attachment = attach(parallel, run.optimizer, plan={"weft_plan": 1, "name": "the same"})
        assert attachment.plan == "ddp" and not attachment.late, vars(attachment)
        tells("twice", ValueError, lambda: attach(parallel))
        tells("another model", ValueError, lambda: attach(
            DistributedDataParallel(torch.nn.Linear(2, 2))))
        tells("uneven", RuntimeError, parallel.join)
        tells("uneven too", RuntimeError, lambda: Join([parallel]))
        tells("hook", RuntimeError, lambda: parallel.register_comm_hook(None, None))
        parallel.require_backward_grad_sync = True
        tells("flag", RuntimeError, run.backward)
        parallel.require_backward_grad_sync = False
        twin = copy.deepcopy(parallel)
        with torch.no_grad():
            twin(run.model.batch())
        tells("copy", RuntimeError, lambda: twin(run.model.batch()))
        tells("pickle", RuntimeError, lambda: torch.save(parallel, io.BytesIO()))
        run.model.never.requires_grad_(False)
        tells("no gradient", RuntimeError, run.step)
        tells("next step", RuntimeError, run.backward)
        attachment.detach()
        run.model.never.requires_grad_(True)
        tells("incomplete", RuntimeError, lambda: attach(parallel))
        dist.barrier()  # who leaves now ends it for the other
    with group_of("weft", rank, 2, folder, 2, "ddp"):
        run = Run(rank, "convolutional", None, momentum)
        loss = run.parallel(run.model.batch()).sum()
        loss.backward(retain_graph=True)
        tells("second gradient", RuntimeError, loss.backward)
    return said


def of_some_ranks(rank, folder):
    from weft import torch as weft_torch

    with group_of("weft", rank, 3, folder, 0):
        group = dist.new_group([0, 1])
        if rank < 2:
            model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
            try:
                weft_torch.attach(model)
            except ValueError as refused:
                return str(refused)


def waits(rank, folder, plan):
    """Rank 1 is a second late in backward: where rank 0 waits for it, and for how much."""
    from weft.torch._late import Late

    with group_of("weft", rank, 2, folder, 0, plan):
        run = Run(rank, "convolutional", plan, momentum)
        run.step()
        run.optimizer.zero_grad()
        if rank == 1:
            time.sleep(1)
        run.backward()
        times = [time.monotonic()]
        run.optimizer.step()
        times.append(time.monotonic())
        layers = [run.model[0], run.model[1], run.model[4], run.model[7]]
        out = {"late": [type(layer.weight) is Late for layer in layers]}
        run.model[0](run.model.batch())
        times.append(time.monotonic())
        out["then"] = [type(layer.weight) is Late for layer in layers]
        out["seconds"] = [after - before for before, after in zip(times, times[1:])]
        out["buckets"] = run.attachment.buckets
        return out


def lose_a_rank(rank, how, folder):
    """Rank 1 ends in the middle of backward; what the others are told, and when."""
    from weft import torch as weft_torch

    with group_of("weft", rank, 3, folder, 0, SMALL,
                  timeout=datetime.timedelta(seconds=2 if how == "stuck" else 60)):
        run = Run(rank, "convolutional", SMALL, momentum)
        for _ in range(3):
            run.step()

        def end(_gradient):
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stuck":
                time.sleep(6)
            if how == "leaves":
                dist.destroy_process_group()
            raise SystemExit(3)

        if rank == 1:
            run.model[4].weight.register_hook(end)
        began = time.monotonic()
        try:
            run.step()
            run.step()
            said = None
        except RuntimeError as failure:
            said = [type(failure).__name__, str(failure)]
        seconds = time.monotonic() - began
        # What there is can still be read, by who was told that updates are lost.
        with contextlib.suppress(RuntimeError):
            weft_torch.synchronize(run.parallel)
        sums = sum(p.sum().item() for p in run.model.parameters())
        return {"said": said, "seconds": seconds, "blamed": weft_torch.culprit(), "sums": sums}


def record(rank, folder):
    with group_of("weft", rank, 2, folder, 0, SMALL):
        run = Run(rank, "transformer", SMALL, adamw)
        plain_steps(run)
        return run.attachment.buckets


class Attached(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-attach-")

    def tearDown(self):
        shutil.rmtree(self.folder)

    def run_all(self, size, backend, names):
        return answers(run_ranks(size, run_courses, size, backend, self.folder, names, limit=200))

    def test_ends_where_gloo_ends(self):
        names = [name for name in sys.argv[1:] if name in COURSES] or list(COURSES)
        ours, theirs = (self.run_all(2, backend, names) for backend in ("weft", "gloo"))
        for name in names:
            with self.subTest(course=name):
                plan = COURSES[name][1]
                for rank in range(2):
                    late = ours[rank][name].pop("late")
                    self.assertEqual(late, plan in ("default", SMALL) and name != "not given")
                    self.assertEqual(ours[rank][name], theirs[rank][name])

    def test_ends_where_gloo_ends_but_for_the_order_of_additions(self):
        names = ["transformer, default plan", "accumulation", "optimizer SGD"]
        ours, theirs = (self.run_all(3, backend, names) for backend in ("weft", "gloo"))
        for name in names:
            self.assertEqual(len({one[name]["state"] for one in ours}), 1)
            for one, other in zip(ours, theirs):
                for a, b in zip(one[name]["losses"], other[name]["losses"]):
                    self.assertAlmostEqual(a, b, delta=1e-4)

    def test_refuses_what_it_cannot_do(self):
        for said in answers(run_ranks(2, refusals, self.folder, limit=100)):
            for name, words in (
                    ("gloo", 'is of "gloo": call init_process_group("weft")'),
                    ("module", "takes a DistributedDataParallel model, not Odd"),
                    ("optimizer", "takes a torch optimizer"),
                    ("plan", 'runs under the plan "ddp"'), ("plan", "set WEFT_PLAN"),
                    ("wrong plan", 'did you mean "lanes"'),
                    ("not attached", "call weft.torch.attach first"),
                    ("static graph", "static_graph=True"),
                    ("sparse", "with sparse=False"),
                    ("twice", "detach it first"),
                    ("another model", "of another model"),
                    ("uneven", "detach() before join()"),
                    ("uneven too", "detach() before join()"),
                    ("hook", "detach() before register_comm_hook()"),
                    ("flag", "inside no_sync()"),
                    ("copy", "nobody would sum its gradients"),
                    ("pickle", "save its state_dict()"),
                    ("no gradient", '"never.weight"'),
                    ("no gradient", "find_unused_parameters=True"),
                    ("next step", '"sometimes.weight"'),
                    ("incomplete", "a step of the exchange was left"),
                    ("second gradient", 'got a second gradient in one step')):
                self.assertIn(words, said[name])

    def test_refuses_a_group_of_some_ranks(self):
        for said in answers(run_ranks(3, of_some_ranks, self.folder))[:2]:
            self.assertIn("among all ranks of the first process group", said)

    def test_leaves_each_layer_to_its_next_use(self):
        late = answers(run_ranks(2, waits, self.folder, SMALL))[0]
        self.assertEqual(late["late"], [True] * 4)
        self.assertEqual(late["then"], [False, True, True, True])
        self.assertLess(late["seconds"][0], 0.5)
        self.assertGreater(late["seconds"][1], 0.5)
        at_once = answers(run_ranks(2, waits, self.folder + "/all", ALL_AT_ONCE))[0]
        self.assertEqual(at_once["late"], [False] * 4)
        self.assertGreater(at_once["seconds"][0], 0.5)
        # Two weights are larger than a bucket and go alone; what lies between goes together.
        self.assertEqual(late["buckets"], 5)

    def lost(self, how, within):
        ranks = run_ranks(3, lose_a_rank, how, self.folder, limit=100)
        for number in (0, 2):
            told = answers([ranks[number]])[0]
            self.assertIsNotNone(told["said"], "the steps succeeded without rank 1")
            self.assertIn("rank 1", told["said"][1])
            self.assertEqual(told["blamed"], 1)
            self.assertLess(told["seconds"], within)
        return ranks[1].status

    def test_names_a_rank_that_was_killed_in_backward(self):
        self.assertEqual(self.lost("killed", 2), -signal.SIGKILL)

    def test_names_a_rank_that_ended_in_backward(self):
        self.assertEqual(self.lost("ends", 8), 3)

    def test_names_a_rank_that_left_in_backward(self):
        self.assertEqual(self.lost("leaves", 2), 3)

    def test_names_a_rank_that_is_stuck_in_backward(self):
        self.lost("stuck", 5)

    def test_a_trace_knows_the_modules(self):
        traces = f"{self.folder}/traces"
        answers(run_ranks(2, record, self.folder, limit=100, environment={"WEFT_TRACE": traces}))
        import weft

        def says(*words):
            done = subprocess.run([weft.program(), *words, traces], capture_output=True, text=True)
            return done.returncode, done.stdout + done.stderr

        self.assertEqual(says("info")[0], 0)
        status, layers = says("show", "--by", "layer")
        self.assertEqual(status, 0, layers)
        status, tensors = says("show", "--by", "tensor")
        self.assertEqual(status, 0, tensors)
        model = Transformer()
        for name, _ in model.named_parameters():
            self.assertRegex(layers, rf"(?m)^{name.rpartition('.')[0]} .*B ")
            self.assertRegex(tensors, rf"(?m)^{name} +10 ")  # 5 steps of 2 ranks
        # Compute is recorded beside the gradients, so that time can be accounted for. A machine that
        # gave the probe no time is the one thing that may be missed.
        status, words = says("diagnose")
        if status == 0:
            self.assertRegex(words, r"(?m)^spent on +compute \d")
        else:
            self.assertIn("probe", words)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] and not sys.argv[1].startswith("Attached"):
        # Some courses only.
        unittest.main(argv=[sys.argv[0], "Attached.test_ends_where_gloo_ends"])
    unittest.main()
