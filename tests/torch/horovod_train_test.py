#!/usr/bin/env python3
"""Training by Horovod's interface over weft: optimizers, and a script as people write them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import unittest
import warnings

import torch

import horovod_script
import weft
import weft.torch.horovod as hvd
from horovod_support import exchanged, five, near, refused, run_ranks
from support import answers, free_port

HERE = os.path.dirname(os.path.abspath(__file__))

# ---- what the ranks do -----------------------------------------------------------------------


def script(_rank, words):
    return horovod_script.train(horovod_script.arguments(words))


def optimizer_checks(rank, size):
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    hvd.broadcast_parameters(model.state_dict(), 0)

    def plain():
        return torch.optim.SGD(model.parameters(), lr=0.1)

    named = list(model.named_parameters())
    make = hvd.DistributedOptimizer
    refused(ValueError, "duplicates: 0.weight", make, plain(), named + named[:1])
    refused(ValueError, "not named: number 3 of group 0", make, plain(), named[:3])
    refused(ValueError, "sequence of tuples", make, plain(), model.parameters())
    refused(ValueError, "must be > 0", make, plain(), named, backward_passes_per_step=0)
    refused(ValueError, "op != Average", make, plain(), named, op=hvd.Sum,
            gradient_predivide_factor=2.0)
    refused(ValueError, "non-negative", make, plain(), named, groups=-1)
    refused(ValueError, "only appear once", make, plain(), named, groups=[[named[0][1]] * 2])
    refused(ValueError, "must consist", make, plain(), named, groups=[[1]])
    refused(ValueError, "Average or hvd.Sum", make, plain(), named, op=hvd.Max)
    optimizer = make(plain(), named)
    assert isinstance(optimizer, torch.optim.SGD) and type(optimizer).__name__ == "SGD"
    batch = torch.full((1, 2), rank + 1.0)
    model(batch).sum().backward()
    refused(AssertionError, "prohibited", optimizer.zero_grad)
    refused(AssertionError, "more than backward_passes_per_step", model(batch).sum().backward)
    optimizer.synchronize()
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.synchronize()
    near(model[1].bias.grad, [1.0])
    expected = (size + 1) / 2 * model[1].weight.detach().t().expand(2, 2)
    near(model[0].weight.grad, expected)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        optimizer.step()
    assert any("skip_synchronize" in str(one.message) for one in said), said
    optimizer.zero_grad()
    # More passes from now on; a step in the middle sends what there is.
    optimizer.set_backward_passes_per_step(2)
    for _ in range(2):
        model(batch).sum().backward()
    optimizer.synchronize()
    near(model[1].bias.grad, [2.0])
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.synchronize()
    near(model[1].bias.grad, [1.0])
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())


def last_step(parameters, loss, by_exchange, **options):
    """What the third step of a new job changed, where by_exchange gradients are exchanged."""
    hvd.shutdown()
    hvd.init()
    if "process_set" in options:
        options["process_set"] = hvd.add_process_set(options["process_set"])
    plain = torch.optim.SGD(parameters, lr=1.0)
    names = [(f"part {number}.weight", one) for number, one in enumerate(parameters)]
    optimizer = hvd.DistributedOptimizer(plain, names, **options)
    for step in range(3):
        before = [one.detach().clone() for one in parameters]
        optimizer.zero_grad(set_to_none=step != 1)
        loss().backward()
        optimizer.step()
    assert exchanged(optimizer) == by_exchange, exchanged(optimizer)
    return [old - new.detach() for old, new in zip(before, parameters)]


def optimizer_kinds(rank, size):
    """Steps of which the gradients are known: rank + 1 for each parameter."""
    mean, total = (size + 1) / 2, size * (size + 1) / 2
    for options, expected, by_exchange in (
            ({}, mean, 5), ({"op": hvd.Sum}, total, 5),
            ({"gradient_predivide_factor": 4.0}, mean, 5),
            ({"backward_passes_per_step": 2}, mean, 5),
            ({"compression": hvd.Compression.fp16}, mean, 0), ({"groups": 2}, mean, 0),
            ({"num_groups": 3}, mean, 0), ({"groups": "of some"}, mean, 0),
            ({"process_set": [0, 1]}, 1.5, 0)):
        parameters = five()
        if options.get("groups") == "of some":
            options = {"groups": [parameters[1:3], parameters[3:]]}
        if "process_set" in options and size == 2:
            continue
        if "process_set" in options and rank == 2:
            expected = rank + 1.0  # by its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for got in last_step(parameters, lambda: sum(map(torch.sum, parameters)) * (rank + 1),
                                 by_exchange, **options):
                near(got, torch.full_like(got, expected))
    # Parameters that get no gradient, on some ranks or on all.
    parameters = five()
    got = last_step(parameters, lambda: parameters[0].sum() + parameters[rank + 1].sum(), 5)
    near(got[0], [1.0])
    for number in range(1, 5):
        near(got[number], torch.full((number + 1,), 1 / size if number <= size else 0.0))
    for one in parameters:
        assert one.grad is not None
    # Embeddings with sparse gradients, as they are and as dense ones.
    for dense in (False, True):
        table = torch.nn.Embedding(4, 2, sparse=True)
        other = torch.nn.Parameter(torch.zeros(1))
        words = torch.tensor([rank, 3])
        got = last_step([table.weight, other], lambda: table(words).sum() + other.sum(),
                        1 + dense, sparse_as_dense=dense)
        expected = torch.zeros(4, 2)
        expected[:size] = 1 / size
        expected[3] += 1.0
        near(got[0], expected)
        near(got[1], [1.0])


def optimizer_lives(rank, size):
    """What comes before, between and beside the steps of an optimizer."""
    hvd.init()
    mean = (size + 1) / 2
    # A closure is called by the optimizer, and its gradients are those of all ranks.
    parameters = five()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))

    def closure():
        optimizer.zero_grad()
        value = sum(one.sum() for one in parameters) * (rank + 1)
        value.backward()
        return value

    for step in range(3):
        assert abs(optimizer.step(closure) + 15 * step * mean * (rank + 1)) < 1e-4
        for one in parameters:
            near(one.detach(), torch.full_like(one, -mean * (step + 1)))
    assert exchanged(optimizer) == 5
    # Clipping, between synchronize() and the update; and what is combined twice is the same.
    for _ in range(2):
        optimizer.zero_grad()
        sum(one.sum() for one in parameters).mul(rank + 1).backward()
        optimizer.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        near(norm, mean * 15**0.5)
        before = parameters[4].detach().clone()
        with optimizer.skip_synchronize():
            optimizer.step()
        torch.testing.assert_close(before - parameters[4].detach(), torch.full((5,), 15**-0.5))
    held = parameters[0].grad.clone()
    optimizer.synchronize()
    near(parameters[0].grad, held)
    # Gradients on their way when a state is loaded.
    optimizer.zero_grad()
    sum(one.sum() for one in parameters).backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    sum(one.sum() for one in parameters).backward()
    optimizer.synchronize()
    near(parameters[0].grad, [1.0])
    optimizer.zero_grad()
    # State and schedules of the optimizer that was given live on; and there is one exchange only.
    parameters = five()
    plain = torch.optim.SGD(parameters, lr=1.0, momentum=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    (parameters[0] * (rank + 1)).sum().backward()
    plain.step()
    schedule.step()
    second = hvd.DistributedOptimizer(plain)
    second.zero_grad()
    (parameters[0] * (rank + 1)).sum().backward()
    second.step()
    near(parameters[0].detach(), [-(rank + 1) - 0.5 * (rank + 1 + mean)])
    assert exchanged(second) == 0 and exchanged(optimizer) == 5
    # Both work on, in any order.
    for one, grads in ((optimizer, optimizer.param_groups), (second, second.param_groups)):
        one.zero_grad()
        sum(p.sum() for p in grads[0]["params"]).backward()
    for one in (optimizer, second)[:: 1 - 2 * (rank == 0)]:
        one.step()
    hvd.barrier()


def join_while_training(rank, size):
    """One rank has more batches than the others, from the first step on or later."""
    for few in (0, 3):
        hvd.init()
        parameters = five()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        for _ in range(few + 2 * (rank == 1)):
            optimizer.zero_grad()
            sum(one.sum() for one in parameters).backward()
            optimizer.step()
        assert exchanged(optimizer) == (5 if few else 0)
        assert hvd.join() == 1
        hvd.broadcast_parameters(parameters, 1)
        for one in parameters:
            near(one.detach(), torch.full_like(one, -(few + 2 / size)))
        # Another epoch.
        for _ in range(2):
            optimizer.zero_grad()
            (parameters[0] * (rank + 1)).sum().backward()
            optimizer.step()
            near(parameters[0].grad, [(size + 1) / 2])
        assert exchanged(optimizer) == 5
        hvd.shutdown()


# ---- tests -----------------------------------------------------------------------------------


def lose_a_rank_in_training(rank, _size):
    """In mid-step, when gradients go by the exchange."""
    hvd.init()
    parameters = five()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(one.sum() for one in parameters)
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if step < 2:
            loss.backward()
            optimizer.step()
    assert exchanged(optimizer) == 5

    def last():
        loss.backward()
        optimizer.step()

    refused(RuntimeError, "rank 1", last)
    refused(hvd.HorovodInternalError, "rank 1", hvd.allreduce, torch.ones(1))


class Optimizers(unittest.TestCase):
    def test_what_is_asked_of_them(self):
        answers(run_ranks(2, optimizer_checks, 2))

    def test_what_they_are_given(self):
        for size in (2, 3):
            answers(run_ranks(size, optimizer_kinds, size))

    def test_what_happens_to_them(self):
        answers(run_ranks(2, optimizer_lives, 2))

    def test_join(self):
        for size in (2, 3):
            answers(run_ranks(size, join_while_training, size))

    def test_a_script_has_the_parameters_of_one_process(self):
        for size, words in ((2, []), (3, []), (2, ["--adam"]), (2, ["--passes", "2"]),
                            (2, ["--clip"]), (3, ["--clip", "--passes", "2", "--adam"]),
                            (2, ["--predivide", "8"]), (2, ["--groups", "2"]), (2, ["--fp16"])):
            with self.subTest(ranks=size, words=words):
                said = answers(run_ranks(size, script, words))
                self.assertEqual(len({one["digest"] for one in said}), 1)
                alone = horovod_script.train_alone(horovod_script.arguments(words), size)
                loose = 2e-3 if "--fp16" in words else 2e-5
                torch.testing.assert_close(torch.tensor(said[0]["parameters"]), alone,
                                           rtol=loose, atol=loose)

    def test_a_rank_that_dies_in_training_is_named(self):
        ranks = run_ranks(2, lose_a_rank_in_training, 2)
        self.assertEqual(ranks[1].status, -signal.SIGKILL)
        answers(ranks[:1])


class Launchers(unittest.TestCase):
    """The script as a program, by whoever starts it."""

    def outcomes(self, command, **environment):
        own = [sys.executable, os.path.join(HERE, "horovod_script.py"), "--epochs", "1"]
        kept = {name: value for name, value in os.environ.items()
                if not name.startswith(("WEFT_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_"))}
        done = subprocess.run([*command, *own], capture_output=True, text=True, timeout=240,
                              env={**kept, **environment})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        said = [json.loads(line.split("outcome ", 1)[1]) for line in done.stdout.splitlines()
                if "outcome " in line]
        return sorted(said, key=lambda one: one["rank"])

    def check(self, said, size):
        self.assertEqual([(one["rank"], one["size"]) for one in said],
                         [(rank, size) for rank in range(size)])
        self.assertEqual(len({one["digest"] for one in said}), 1)

    def test_nobody(self):
        self.check(self.outcomes([]), 1)

    def test_torchrun(self):
        self.check(self.outcomes([sys.executable, "-m", "torch.distributed.run", "--standalone",
                                  "--nproc_per_node", "2", "--no-python"]), 2)

    def test_weft_run(self):
        self.check(self.outcomes([weft.program(), "run", "-n", "3", "--"]), 3)

    def test_open_mpi(self):
        if not shutil.which("mpirun.openmpi"):
            self.skipTest("openmpi-bin is not installed")
        self.check(self.outcomes(["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n",
                                  "2"]), 2)

    def test_variables_of_horovodrun(self):
        port = free_port() - 1
        own = [sys.executable, os.path.join(HERE, "horovod_script.py"), "--epochs", "1"]
        ranks = [subprocess.Popen(own, stdout=subprocess.PIPE, text=True, env={
            **os.environ, "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2",
            "HOROVOD_LOCAL_RANK": str(rank), "HOROVOD_LOCAL_SIZE": "2",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}) for rank in range(2)]
        said = [json.loads(one.communicate(timeout=240)[0].split("outcome ", 1)[1])
                for one in ranks]
        self.check(sorted(said, key=lambda one: one["rank"]), 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
