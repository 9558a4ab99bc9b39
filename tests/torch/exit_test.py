#!/usr/bin/env python3
"""Programs end in every order in which their parts can, and none is aborted.

    exit_test.py [TIMES]        of each way to end
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import run_ranks

KEPT = []  # what lives until the interpreter goes


def trained():
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64),
                                                        torch.nn.Linear(64, 8)))
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    return model


def a_model_outlives_its_group(_rank):
    KEPT.append(trained())
    dist.destroy_process_group()


def nothing_is_destroyed(_rank):
    KEPT.append(trained())


def work_outlives_its_group(_rank):
    tensor = torch.ones(1000)
    KEPT.append([dist.all_reduce(tensor, async_op=True) for _ in range(8)])
    KEPT[-1][-1].wait()
    dist.destroy_process_group()


def work_is_not_waited_for(_rank):
    for _ in range(8):
        dist.all_reduce(torch.ones(1000), async_op=True)
    dist.barrier()


def callbacks_of_python(_rank):
    for _ in range(4):
        work = dist.all_reduce(torch.ones(10), async_op=True)
        KEPT.append(work.get_future().then(lambda done: done.value()[0] * 2))
    KEPT[-1].wait()
    dist.destroy_process_group()


def groups_outlive_the_first(rank):
    KEPT.append([dist.new_group([0, 1]), trained()])
    dist.all_reduce(torch.ones(3), group=KEPT[-1][0])
    dist.destroy_process_group()


def one_leaves_late(rank):
    KEPT.append(trained())
    time.sleep(0.2 * rank)


WAYS = [a_model_outlives_its_group, nothing_is_destroyed, work_outlives_its_group,
        work_is_not_waited_for, callbacks_of_python, groups_outlive_the_first, one_leaves_late]


def one(rank, way):
    dist.init_process_group("weft")
    way(rank)


def main():
    torch.set_num_threads(1)
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    failed = 0
    for way in WAYS:
        for _ in range(times):
            for number, rank in enumerate(run_ranks(2, one, way, limit=30)):
                if rank.status != 0:
                    failed += 1
                    print(f"{way.__name__}: rank {number}: {rank}", flush=True)
        print(f"{way.__name__}: {2 * times} exits", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
