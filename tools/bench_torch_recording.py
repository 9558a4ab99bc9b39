"""What recording costs a training step in PyTorch: with it and without, in turns.

    python tools/bench_torch_recording.py [--rounds 30] [--steps 5] [MODEL ...]

Two jobs of two ranks train the same model at the same time, one with WEFT_TRACE and one without.
Only one of them is at work: they take turns of some steps, in an order that chance decides. A round
is a turn of each, and its figure the difference between them; stated are the mean and its 95 %
interval, from resampling rounds. By an interpreter that has weft.torch (docs/torch.md).
"""

import argparse
import importlib.util
import os
import pathlib
import random
import socket
import statistics
import struct
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS = 2
EXAMPLE = pathlib.Path(__file__).resolve().parent.parent / "examples" / "torch" / "train.py"


def example():
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rank_of_job(rank, port, folder, name, steps, orders, answers):
    """Trains when it is told to, and answers how long that took."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WEFT_TRACE=folder)
    training = example()
    torch.set_num_threads(1)
    dist.init_process_group("weft")
    torch.manual_seed(1)
    kind = training.MODELS[name]
    model = DistributedDataParallel(kind())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    samples = training.Samples(kind, 8 * 10**6, rank)
    batches = iter(torch.utils.data.DataLoader(samples, 8))
    while os.read(orders, 1) == b"+":
        began = time.perf_counter()
        for _ in range(steps):
            training.step(model, optimizer, *next(batches))
        os.write(answers, struct.pack("d", (time.perf_counter() - began) / steps))
    dist.destroy_process_group()


class Job:
    def __init__(self, folder, name, steps):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.orders, self.answers, self.children = [], [], []
        for rank in range(RANKS):
            orders, answers = os.pipe(), os.pipe()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    for end in (orders[1], answers[0], *self.orders, *self.answers):
                        os.close(end)
                    rank_of_job(rank, port, folder, name, steps, orders[0], answers[1])
                    status = 0
                finally:
                    os._exit(status)
            os.close(orders[0])
            os.close(answers[1])
            self.orders.append(orders[1])
            self.answers.append(answers[0])
            self.children.append(child)

    def turn(self):
        """Seconds a step, on the slower rank."""
        for order in self.orders:
            os.write(order, b"+")
        return max(struct.unpack("d", os.read(answer, 8))[0] for answer in self.answers)

    def end(self):
        for order in self.orders:
            os.write(order, b"-")
        for child in self.children:
            if os.waitpid(child, 0)[1] != 0:
                sys.exit("a rank failed")


def interval(differences):
    means = sorted(statistics.fmean(random.choices(differences, k=len(differences)))
                   for _ in range(4000))
    return means[100], means[-101]


def measure(name, rounds, steps):
    with tempfile.TemporaryDirectory() as folder:
        jobs = {"on": Job(folder, name, steps), "off": Job("", name, steps)}
        for job in jobs.values():  # warms up
            for _ in range(3):
                job.turn()
        seconds = {"on": [], "off": []}
        for _ in range(rounds):
            for which in random.sample(list(jobs), 2):
                seconds[which].append(jobs[which].turn())
        for job in jobs.values():
            job.end()
        recorded = sum(path.stat().st_size for path in pathlib.Path(folder).iterdir())
    off = statistics.median(seconds["off"])
    percent = [100 * (a - b) / off for a, b in zip(seconds["on"], seconds["off"])]
    low, high = interval(percent)
    print(f"{name}: {1e3 * off:.1f} ms a step without recording, with it "
          f"{statistics.fmean(percent):+.2f} % (95 %: {low:+.2f} to {high:+.2f}), median "
          f"{statistics.median(percent):+.2f} %; {rounds} rounds of {steps} steps, "
          f"{recorded / RANKS / ((rounds + 3) * steps) / 1e3:.1f} kB a step and rank", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["convolutional", "transformer"])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    for name in given.models:
        measure(name, given.rounds, given.steps)


if __name__ == "__main__":
    main()
