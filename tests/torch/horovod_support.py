"""What the tests of Horovod's interface share."""

import torch

from support import run_ranks as run_ranks_within


def run_ranks(count, body, *args, limit=240, **options):
    """None of these looks at a clock, and all are to pass on a machine that is busy."""
    return run_ranks_within(count, body, *args, limit=limit, **options)


def same(ours, theirs):
    theirs = torch.as_tensor(theirs)
    if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
        raise AssertionError(f"{ours} instead of {theirs}")


def near(ours, theirs):
    torch.testing.assert_close(ours, torch.as_tensor(theirs), rtol=1e-6, atol=1e-6)


def refused(kind, words, call, *args, **options):
    """What was said by an error that must come."""
    try:
        call(*args, **options)
    except kind as failure:
        assert words in str(failure), failure
        return str(failure)
    raise AssertionError(f"{call} was not refused")


def exchanged(optimizer):
    """How many gradients go by the exchange."""
    return len(optimizer._gradients.parameters) if optimizer._gradients is not None else 0


def five():
    return [torch.nn.Parameter(torch.zeros(n + 1)) for n in range(5)]
