"""What the workers of all engines but weft's own share: the emulated training.

The job is the one that run.cc writes for each rank (job.h). As in weft's own worker, the device is
a timeline of timers; buffers, sockets and reductions are real. Gradients become ready layer by
layer in backward, and a Communicator sums each over all ranks; the step waits for all of them, then
updates.

The gradients' values are those of gradients.h, so that each sum is known exactly. They are checked
and refilled by a second thread while the emulated device is busy.
"""

import ctypes
import json
import os
import socket
import sys
import threading
import time

WARM_UP_ITERATIONS = 2
PERIOD = 97  # of the gradients' values
STEP_OF_INDEX = 7
INVERSE_STEP = 14  # 7 * 14 = 1 modulo 97: turns a summand into a shift of the pattern
PR_SET_TIMERSLACK = 29


def now():
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)


def sleep_until(deadline_ns):
    left = deadline_ns - now()
    while left > 0:
        time.sleep(left * 1e-9)
        left = deadline_ns - now()


def cpu_times():
    """(busy, steal, total) ticks over all processors since boot."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    user, nice, system, idle, iowait, irq, softirq, steal = (ticks + [0] * 8)[:8]
    busy = user + nice + system + irq + softirq
    return busy, steal, busy + idle + iowait + steal


def load(cpu):
    (busy0, steal0, total0), (busy1, steal1, total1) = cpu[min(cpu)], cpu[max(cpu)]
    total = max(total1 - total0, 1)
    return 100 * (busy1 - busy0) / total, 100 * (steal1 - steal0) / total


def interface():
    """The one that carries the host's traffic."""
    return "eth0" if "eth0" in [name for _, name in socket.if_nameindex()] else "lo"


class Device:
    """Runs one thing after another. A timer that fires late delays nothing that comes after."""

    def __init__(self):
        self.free_at = now()

    def depends_on_now(self):
        self.free_at = max(self.free_at, now())

    def run(self, duration_ns):
        self.free_at += duration_ns
        sleep_until(self.free_at)


class Gradients:
    """The buckets' buffers, their values before the sum and the values expected after it."""

    def __init__(self, torch, job):
        self.torch = torch
        self.size = job["size"]
        self.seed = job["seed"]
        elements = [tensor["elements"] for tensor in job["tensors"]]
        longest = max(elements) + PERIOD
        index = torch.arange(longest, dtype=torch.int64)
        base = (index * STEP_OF_INDEX % PERIOD).to(torch.float32)
        self.own = base + job["rank"]
        self.sums = base * self.size + self.size * (self.size - 1) // 2
        self.buffers = []
        self.views = [None] * len(elements)
        for bucket in job["buckets"]:
            buffer = torch.zeros(sum(elements[t] for t in bucket), dtype=torch.float32)
            at = 0
            for t in bucket:
                self.views[t] = buffer[at:at + elements[t]]
                at += elements[t]
            self.buffers.append(buffer)
        missing = [t for t, view in enumerate(self.views) if view is None]
        if missing:
            raise ValueError("tensors in no bucket: %s" % missing[:5])

    def _of(self, table, tensor, step):
        summand = (13 * step + 31 * tensor + self.seed) % PERIOD
        shift = summand * INVERSE_STEP % PERIOD
        return table[shift:shift + self.views[tensor].numel()]

    def fill(self, tensor, step):
        self.views[tensor].copy_(self._of(self.own, tensor, step))

    def is_exact(self, tensor, step):
        return self.torch.equal(self.views[tensor], self._of(self.sums, tensor, step))


class Checker(threading.Thread):
    """Verifies a bucket's sums and refills it, apart from the training thread."""

    def __init__(self, gradients, buckets, verify):
        super().__init__(daemon=True)
        self.gradients, self.buckets, self.verify = gradients, buckets, verify
        self.exact = True
        self.queue = []
        self.filled = [0] * len(buckets)
        self.changed = threading.Condition()
        for bucket in buckets:
            for tensor in bucket:
                gradients.fill(tensor, 0)

    def done(self, bucket, step):
        with self.changed:
            self.queue.append((bucket, step))
            self.changed.notify_all()

    def wait_filled(self, bucket, step):
        with self.changed:
            self.changed.wait_for(lambda: self.filled[bucket] == step)

    def finish(self):
        with self.changed:
            self.changed.wait_for(lambda: not self.queue)
        return self.exact

    def run(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue)
                bucket, step = self.queue[0]
            exact = True
            for tensor in self.buckets[bucket]:
                if self.verify and not self.gradients.is_exact(tensor, step):
                    exact = False
                    sys.stderr.write("tensor %d of step %d: the sum is wrong\n" % (tensor, step))
                self.gradients.fill(tensor, step + 1)
            with self.changed:
                self.exact = self.exact and exact
                self.filled[bucket] = step + 1
                self.queue.pop(0)
                self.changed.notify_all()


class Communicator:
    """What an engine is to the training. This one does nothing: compute alone."""

    name = "nothing"

    def join(self, torch, job):
        """Connects to the other ranks."""

    def groups(self, job):
        """The gradients that share a buffer, in the order in which they are sent."""
        return job["buckets"]

    def start(self, gradients, group, step):
        """All gradients of a group are there."""

    def wait(self):
        """Returns when all that was started is done. False: there was nothing to wait for."""
        return False

    def leave(self):
        """Nobody closes a connection that another still needs."""


class Training:
    def __init__(self, job, groups, communicator, gradients, checker):
        self.job, self.groups, self.communicator = job, groups, communicator
        self.gradients, self.checker = gradients, checker
        self.group_of = [0] * len(job["tensors"])
        for index, group in enumerate(groups):
            for tensor in group:
                self.group_of[tensor] = index

    def backward(self, device, step):
        """Starts each group once it is complete and all before it are started."""
        pending = [len(group) for group in self.groups]
        started = 0
        for layer in reversed(self.job["layers"]):
            device.run(layer["backward_ns"])
            for tensor in layer["tensors"]:
                pending[self.group_of[tensor]] -= 1
            while started < len(pending) and pending[started] == 0:
                self.checker.wait_filled(started, step)
                self.communicator.start(self.gradients, started, step)
                started += 1

    def run(self):
        layers = self.job["layers"]
        iterations = self.job["iterations"]
        starts, cpu = [], {}
        device = Device()
        for step in range(iterations + 1):
            starts.append(device.free_at)
            if step in (min(WARM_UP_ITERATIONS, iterations), iterations):
                cpu[step] = cpu_times()
            if step == iterations:
                break
            for layer in layers:
                device.run(layer["forward_ns"])
            self.backward(device, step)
            if self.communicator.wait():
                device.depends_on_now()
                for group in range(len(self.groups)):
                    self.checker.done(group, step)
            for layer in layers:
                device.run(layer["update_ns"])
        return starts, cpu


def work(job, communicator):
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)

    import torch

    torch.set_num_threads(1)
    if job.get("compute_only", False) or job["size"] == 1:
        communicator = Communicator()
    job["buckets"] = groups = communicator.groups(job)
    gradients = Gradients(torch, job)
    communicates = type(communicator) is not Communicator
    checker = Checker(gradients, groups, communicates)
    checker.start()
    communicator.join(torch, job)
    starts, cpu = Training(job, groups, communicator, gradients, checker).run()
    exact = checker.finish()
    communicator.leave()
    busy, steal = load(cpu)
    with open(job["result"] + ".part", "w") as file:
        json.dump({"starts_ns": starts, "exact": exact, "cpu_busy_percent": busy,
                   "steal_percent": steal, "engine": communicator.name}, file)
    os.rename(job["result"] + ".part", job["result"])


def main(communicator, job_file):
    """Runs a job and ends the process."""
    code = 0
    try:
        with open(job_file) as file:
            job = json.load(file)
        work(job, communicator)
    except Exception as problem:  # a lost peer, most of all: say it in one line
        sys.stderr.write("%s: %s\n" % (type(problem).__name__, str(problem).split("\n")[0]))
        code = 3
    sys.stderr.flush()
    sys.stdout.flush()
    # Threads may wait for a peer that is gone; nothing is left that they should finish.
    os._exit(code)
