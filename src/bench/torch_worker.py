"""One rank of Gloo (as PyTorch brings it) or of Horovod that `weft bench` measures.

  torch_worker.py gloo|horovod

Waits for commands on the harness's socket, WEFT_BENCH_CONTROL, and times collectives; commands and
answers are those of protocol.h. Rank and size are in WEFT_BENCH_RANK and WEFT_BENCH_SIZE, or
Horovod knows them from whoever started it.
"""

import os
import socket
import sys
import time
from datetime import timedelta


class Unsupported(Exception):
    pass


class Gloo:
    def __init__(self, torch):
        import torch.distributed as dist

        self.dist = dist
        self.rank = int(os.environ["WEFT_BENCH_RANK"])
        self.size = int(os.environ["WEFT_BENCH_SIZE"])
        # A bench that is idle for long is no failure.
        dist.init_process_group("gloo", init_method="file://" + os.environ["WEFT_BENCH_STORE"],
                                rank=self.rank, world_size=self.size, timeout=timedelta(hours=1))
        self.ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        self.name = "Gloo of torch %s" % torch.__version__

    def barrier(self):
        self.dist.barrier()

    def prepare(self, collective, tensor_in, tensor_out, op):
        """Returns a function that does it once."""
        dist, size = self.dist, self.size
        if collective == "allreduce":
            return lambda: dist.all_reduce(tensor_out, op)
        if collective == "broadcast":
            return lambda: dist.broadcast(tensor_out, 0)
        part = tensor_in.numel() // size
        if collective == "reduce-scatter":
            parts = list(tensor_in.split(part))
            return lambda: dist.reduce_scatter(tensor_out[:part], parts, op)
        if collective == "all-gather":
            parts = list(tensor_out.split(part))
            return lambda: dist.all_gather(parts, tensor_in[:part])
        if collective == "all-to-all":
            return lambda: dist.all_to_all_single(tensor_out, tensor_in)

        def send_and_receive():
            work = dist.isend(tensor_in, (self.rank + 1) % size)
            dist.recv(tensor_out, (self.rank - 1) % size)
            work.wait()
        return send_and_receive


class Horovod:
    def __init__(self, torch):
        import horovod
        import horovod.torch as hvd

        if "WEFT_BENCH_RANK" in os.environ:  # otherwise mpirun has told it all
            sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../lab"))
            import horovod_start

            size, port = int(os.environ["WEFT_BENCH_SIZE"]), int(os.environ["WEFT_BENCH_PORT"])
            self.kept = horovod_start.start(int(os.environ["WEFT_BENCH_RANK"]),
                                            [("localhost", size)], "127.0.0.1", port, "lo")
        hvd.init()
        self.hvd = hvd
        self.rank, self.size = hvd.rank(), hvd.size()
        self.ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}
        under = "MPI" if hvd.mpi_enabled() else "Gloo"
        self.name = "Horovod %s over %s, torch %s" % (horovod.__version__, under, torch.__version__)

    def barrier(self):
        self.hvd.barrier()

    def prepare(self, collective, tensor_in, tensor_out, op):
        hvd = self.hvd
        if collective == "allreduce":
            return lambda: hvd.allreduce_(tensor_out, op=op, name="allreduce")
        if collective == "broadcast":
            return lambda: hvd.broadcast_(tensor_out, 0, name="broadcast")
        part = tensor_in.numel() // self.size
        if collective == "reduce-scatter":
            return lambda: hvd.reducescatter(tensor_in, op=op, name="reducescatter")
        if collective == "all-gather":
            return lambda: hvd.allgather(tensor_in[:part], name="allgather")
        if collective == "all-to-all":
            return lambda: hvd.alltoall(tensor_in, name="alltoall")
        raise Unsupported("Horovod has no send and receive")


class Worker:
    def __init__(self, torch, engine):
        self.torch, self.engine = torch, engine

    def value_of(self, rank, index):
        return (index + 3 * rank) % 11

    def expected(self, collective, op, count):
        """What this rank must hold after a collective, as int64."""
        torch, rank, size = self.torch, self.engine.rank, self.engine.size
        index = torch.arange(count, dtype=torch.int64)
        part = count // size
        if collective in ("allreduce", "reduce-scatter"):
            values = torch.stack([self.value_of(r, index) for r in range(size)])
            total = {"sum": lambda v: v.sum(0), "min": lambda v: v.min(0).values,
                     "max": lambda v: v.max(0).values}[op](values)
            return total if collective == "allreduce" else total[rank * part:(rank + 1) * part]
        if collective == "broadcast":
            return self.value_of(0, index)
        if collective == "all-gather":
            return torch.cat([self.value_of(r, index[:part]) for r in range(size)])
        if collective == "all-to-all":
            mine = index[rank * part:(rank + 1) * part]
            return torch.cat([self.value_of(r, mine) for r in range(size)])
        return self.value_of((rank - 1) % size, index)

    def wrong(self, once, collective, op, tensor_in, tensor_out):
        """One more time with data that tells; how many elements are wrong."""
        torch, rank = self.torch, self.engine.rank
        count = tensor_in.numel()
        mine = self.value_of(rank, torch.arange(count, dtype=torch.int64)).to(tensor_in.dtype)
        tensor_in.copy_(mine)
        tensor_out.fill_(3)
        if collective == "allreduce" or collective == "broadcast" and rank == 0:
            tensor_out.copy_(mine)
        answer = once()
        if isinstance(answer, tuple):
            answer = answer[0]
        result = answer if isinstance(answer, torch.Tensor) else tensor_out
        expected = self.expected(collective, op, count).to(tensor_in.dtype)
        if result.numel() < expected.numel():
            return expected.numel()
        return int((result.flatten()[:expected.numel()] != expected).sum())

    def measure(self, collective, type_name, op_name, count, warmups, iterations, check):
        torch, engine = self.torch, self.engine
        dtype = getattr(torch, type_name, None)
        if dtype is None or op_name not in engine.ops:
            raise Unsupported("no %s of %s here" % (op_name, type_name))
        tensor_in = torch.zeros(count, dtype=dtype)
        tensor_out = torch.zeros(count, dtype=dtype)
        once = engine.prepare(collective, tensor_in, tensor_out, engine.ops[op_name])
        for _ in range(warmups):
            once()
        engine.barrier()
        begin = time.perf_counter()
        for _ in range(iterations):
            once()
        seconds = time.perf_counter() - begin
        wrong = self.wrong(once, collective, op_name, tensor_in, tensor_out) if check else 0
        engine.barrier()
        return seconds, wrong


def serve(worker, name):
    harness = socket.socket(socket.AF_UNIX)
    harness.connect(os.environ["WEFT_BENCH_CONTROL"])
    stream = harness.makefile("rw")
    stream.write("hello %d %d %s\n" % (worker.engine.rank, os.getpid(), name))
    stream.flush()
    for line in stream:
        words = line.split()
        if words[0] != "measure":
            break
        try:
            numbers = [int(word) for word in words[4:8]]
            answer = "done %.9f %d" % worker.measure(*words[1:4], *numbers)
        except Exception as problem:  # whatever it is, the harness has to hear of it
            answer = "error %s" % str(problem).strip().split("\n")[0]
        stream.write(answer + "\n")
        stream.flush()


def main():
    import torch

    torch.set_num_threads(1)
    engine = Gloo(torch) if sys.argv[1] == "gloo" else Horovod(torch)
    serve(Worker(torch, engine), engine.name)


if __name__ == "__main__":
    code = 0
    try:
        main()
    except Exception as problem:
        sys.stderr.write("%s: %s\n" % (type(problem).__name__, str(problem).strip().split("\n")[0]))
        code = 3
    sys.stderr.flush()
    os._exit(code)  # threads of a library may wait for a peer that is gone
