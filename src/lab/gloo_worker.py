"""One rank of a job of `weft lab run --engine gloo`: emulated training over PyTorch's Gloo.

A bucket is all-reduced once all of its gradients are ready, in bucket order. Gradients live in
their bucket's buffer (DDP's gradient_as_bucket_view), which spares Gloo the copies that DDP makes
by default. No DDP module is used, because there is no real backward to hook.
"""

import os
import sys
from datetime import timedelta

import training

TIMEOUT = timedelta(seconds=60)


class Gloo(training.Communicator):
    def __init__(self):
        self.works = []

    def join(self, torch, job):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", training.interface())
        import torch.distributed as dist

        self.dist = dist
        self.name = "gloo, torch %s" % torch.__version__
        dist.init_process_group("gloo", init_method="tcp://%s:%d" % (job["master_addr"],
                                                                    job["master_port"]),
                                rank=job["rank"], world_size=job["size"], timeout=TIMEOUT)
        dist.barrier()

    def start(self, gradients, group, step):
        self.works.append(self.dist.all_reduce(gradients.buffers[group], async_op=True))

    def wait(self):
        for work in self.works:
            work.wait()
        self.works = []
        return True

    def leave(self):
        self.dist.barrier()


if __name__ == "__main__":
    training.main(Gloo(), sys.argv[1])
