"""One rank of a job of `weft lab run --engine horovod`: emulated training over Horovod with Gloo.

Each gradient is submitted by itself when backward has made it, as Horovod's DistributedOptimizer
does; Horovod negotiates, fuses and orders them. The step waits for all. Its settings are its
defaults, seen from the target: bytes and time in the lab are the target's times a factor, so the
fusion threshold and the cycle are too.
"""

import os
import sys

import horovod_start
import training

FUSION_BYTES = 128 << 20
CYCLE_MS = 1.0


class Horovod(training.Communicator):
    def __init__(self):
        self.handles = []

    def groups(self, job):
        order = [t for layer in reversed(job["layers"]) for t in reversed(layer["tensors"])]
        return [[tensor] for tensor in order]

    def join(self, torch, job):
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(int(FUSION_BYTES / job["shrink"]))
        os.environ["HOROVOD_CYCLE_TIME"] = str(CYCLE_MS * job["dilation"] / job["shrink"])
        hosts = [("host%d" % rank, 1) for rank in range(job["size"])]
        self.kept = horovod_start.start(job["rank"], hosts, job["master_addr"],
                                        job["master_port"], training.interface())
        import horovod
        import horovod.torch as hvd

        hvd.init()
        self.hvd = hvd
        self.name = "horovod %s over Gloo, torch %s" % (horovod.__version__, torch.__version__)
        hvd.barrier()

    def start(self, gradients, group, step):
        self.handles.append(self.hvd.allreduce_async_(gradients.buffers[group], op=self.hvd.Sum,
                                                      name="gradient.%d" % group))

    def wait(self):
        for handle in self.handles:
            self.hvd.synchronize(handle)
        self.handles = []
        return True

    def leave(self):
        self.hvd.barrier()
        self.hvd.shutdown()


if __name__ == "__main__":
    training.main(Horovod(), sys.argv[1])
