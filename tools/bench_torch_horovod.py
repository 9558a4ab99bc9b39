"""Trains a model of examples/torch under Horovod, for the table of tools/bench.

    weft run -n 2 -- python bench_torch_horovod.py --model transformer

By the interpreter that tools/peers builds for Horovod, with the torch that it was built for.
"""
import importlib.util
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src" / "lab"))

import horovod_start  # noqa: E402
import torch  # noqa: E402
import training  # noqa: E402


def example():
    spec = importlib.util.spec_from_file_location("train", ROOT / "examples" / "torch" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    train = example()
    given = train.options()
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    hosts = [(f"host{h}", local) for h in range(size // local)]
    interface = "lo" if local == size else training.interface()
    kept = horovod_start.start(rank, hosts, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), interface)
    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(given.threads)
    torch.manual_seed(1)
    model = train.MODELS[given.model]()
    optimizer = hvd.DistributedOptimizer(torch.optim.AdamW(model.parameters(), 1e-3), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    train.train(given, rank, model, optimizer)
    hvd.barrier()
    hvd.shutdown()
    del kept


if __name__ == "__main__":
    main()
