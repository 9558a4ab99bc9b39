#!/usr/bin/env python3
"""Runs the tests of process groups that torch carries in its wheel against a backend on CPU.

    suite.py --backend weft                      all of them, on 4 ranks
    suite.py --backend weft --ranks 2 broadcast  those with this in their names
    suite.py --backend gloo                      torch's own, for comparison

These tests choose by the backend's name what they ask of it: much is asked of "gloo" only, some of
"mpi" only. To them the backend answers to both names, so that everything is asked. What needs an
accelerator is skipped. The last line is one JSON object; the exit status is 0 if none failed, except
those named by --may-fail.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
import unittest

OTHER_NAMES = ("gloo", "mpi")


class Answering(str):
    """A backend's name that equals others too; in a set it is found as the first of them."""

    def __eq__(self, other):
        return str(self) == str(other) or str(other) in OTHER_NAMES

    def __ne__(self, other):
        return not self == other

    def __hash__(self):
        return hash(OTHER_NAMES[0])

    def __str__(self):
        return str.__str__(self)


@contextlib.contextmanager
def environment_says(name, value):
    """os.environ[name] is `value` itself, of whichever class it is."""
    environ = type(os.environ)
    plain = environ.__getitem__

    def get(self, key):
        return value if key == name else plain(self, key)

    environ.__getitem__ = get
    try:
        yield
    finally:
        environ.__getitem__ = plain


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="weft")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=int, default=60, help="seconds for one test")
    parser.add_argument("--profiling", action="store_true", help="ask for profiler events too")
    parser.add_argument("--may-fail", action="append", default=[], metavar="NAME")
    parser.add_argument("--log", default=os.devnull, help="where the tests' own words go")
    parser.add_argument("--exact", action="store_true", help="the names are whole names")
    parser.add_argument("names", nargs="*", help="parts of names; none: all tests")
    return parser.parse_args()


def load(options):
    """torch's module of tests, told that there is no accelerator and how many ranks there are."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.update(
        BACKEND=options.backend,
        WORLD_SIZE=str(options.ranks),
        INIT_METHOD="file:///dev/null/replaced/by/each/test",
        CUDA_VISIBLE_DEVICES="",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(options.limit),
    )
    import torch.testing._internal.common_distributed as common

    if options.backend not in ("gloo", "mpi", "nccl"):
        importlib.import_module(f"{options.backend}.torch")
    common.TIMEOUT_DEFAULT = options.limit
    common.TIMEOUT_OVERRIDE.clear()
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common.DistTestCases.backend_feature[feature].add(options.backend)

    # The ranks would be started only to find that there is nothing for them.
    def without_accelerator(_count, *, allow_cpu=False):
        return (lambda test: test) if allow_cpu else unittest.skip("needs accelerators")

    common.skip_if_lt_x_gpu = without_accelerator
    common.skip_if_no_gpu = unittest.skip("needs an accelerator")
    too_small = unittest.skip("needs more ranks")
    common.skip_if_small_worldsize = too_small if options.ranks < 3 else (lambda test: test)
    with environment_says("BACKEND", Answering(options.backend)):
        tests = importlib.import_module("torch.testing._internal.distributed.distributed_test")
    if options.profiling:
        tests.PROFILING_SUPPORTED_BACKENDS.append(options.backend)
        tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append(options.backend)
    # Ranks of other tests use the same processors.
    tests.Barrier.sync.__func__.__defaults__ = (None, options.limit // 2)
    return tests


def case_of(tests):
    import torch

    class Ranks(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            tests.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self):
            ranks = list(self.processes)
            super().tearDown()
            for process in ranks:
                process.join(2)
                if process.is_alive():
                    process.kill()
            with contextlib.suppress(OSError):
                os.unlink(self.file_name)

    return Ranks


class Outcome(unittest.TestResult):
    """Remembers how each test ended, and prints it."""

    def __init__(self, out):
        super().__init__()
        self.out, self.ended, self.words = out, {}, {}

    def _end(self, test, how, words=""):
        name = getattr(test, "_testMethodName", str(test))
        self.ended[name], self.words[name] = how, words
        if how != "skipped":
            print(f"{how:8}{name}", file=self.out, flush=True)

    def addSuccess(self, test):
        self._end(test, "passed")

    def addSkip(self, test, reason):
        self._end(test, "skipped", reason)

    def addFailure(self, test, error):
        self._end(test, "FAILED", self._exc_info_to_string(error, test))

    addError = addFailure

    def addExpectedFailure(self, test, error):
        self._end(test, "passed")

    def addUnexpectedSuccess(self, test):
        self._end(test, "FAILED", "it was expected to fail")

    def named(self, how):
        return sorted(name for name, end in self.ended.items() if end == how)


def main():
    options = arguments()
    out = os.fdopen(os.dup(1), "w")
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    case = case_of(load(options))
    names = unittest.TestLoader().getTestCaseNames(case)
    if options.exact:
        unknown = set(options.names) - set(names)
        if unknown:
            sys.exit(f"torch has no such tests: {', '.join(sorted(unknown))}")
        names = [name for name in names if name in options.names]
    elif options.names:
        names = [name for name in names if any(part in name for part in options.names)]
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    outcome, began = Outcome(out), time.monotonic()
    for name in names:
        os.write(1, f"\n==== {name}\n".encode())
        unittest.TestSuite([case(name)]).run(outcome)
        if outcome.ended.get(name) == "FAILED":
            os.write(1, f"==== FAILED {name}\n{outcome.words[name]}\n".encode())
    failed = [name for name in outcome.named("FAILED") if name not in options.may_fail]
    print(
        json.dumps(
            {
                "backend": options.backend,
                "ranks": options.ranks,
                "passed": len(outcome.named("passed")),
                "skipped": len(outcome.named("skipped")),
                "failed": failed,
                "failed_and_may": sorted(set(outcome.named("FAILED")) - set(failed)),
                "seconds": round(time.monotonic() - began, 1),
            }
        ),
        file=out,
        flush=True,
    )
    return 1 if failed or not outcome.named("passed") else 0


if __name__ == "__main__":
    sys.exit(main())
