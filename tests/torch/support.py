"""Starts ranks of a test: each is this process forked, after torch was imported once."""

import ctypes
import json
import os
import socket
import sys
import tempfile
import time
import traceback


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Rank:
    """What became of one: its exit status (negative: a signal), its answer and its words."""

    def __init__(self, status, answer, words):
        self.status, self.answer, self.words = status, answer, words

    def __repr__(self):
        return f"status {self.status}, answer {self.answer}, said:\n{self.words}"


def run_ranks(count, body, *args, limit=40, environment=None):
    """Runs body(rank, *args) in `count` processes that end as programs do; returns their Ranks.

    What body returns is its answer, through JSON.
    """
    folder = tempfile.mkdtemp(prefix="weft-torch-")
    port = free_port()
    sys.stdout.flush()
    sys.stderr.flush()
    children = {}
    for rank in range(count):
        child = os.fork()
        if child == 0:
            words = os.open(f"{folder}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(words, 1)
            os.dup2(words, 2)
            os.environ.update(
                RANK=str(rank),
                WORLD_SIZE=str(count),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                **(environment or {}),
            )
            status = 1
            try:
                answer = body(rank, *args)
                with open(f"{folder}/{rank}.json", "w") as out:
                    json.dump(answer, out)
                status = 0
            except SystemExit as ends:
                status = ends.code
            except BaseException:
                traceback.print_exc()
            # As a program ends, and not up through whoever started this test.
            ctypes.pythonapi.Py_Exit(status)
        children[child] = rank
    statuses, until = {}, time.monotonic() + limit
    while len(statuses) < count:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in children:
            statuses[children[child]] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > until:
            for child, rank in children.items():
                if rank not in statuses:
                    os.kill(child, 9)
            until += limit
        else:
            time.sleep(0.005)
    ranks = []
    for rank in range(count):
        with open(f"{folder}/{rank}.txt", errors="replace") as said:
            words = said.read()
        answer = None
        if os.path.exists(f"{folder}/{rank}.json"):
            with open(f"{folder}/{rank}.json") as said:
                answer = json.load(said)
        ranks.append(Rank(statuses[rank], answer, words))
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")
    os.rmdir(folder)
    return ranks


def answers(ranks):
    """The answers of ranks that all ended well."""
    for number, rank in enumerate(ranks):
        if rank.status != 0:
            raise AssertionError(f"rank {number}: {rank}")
    return [rank.answer for rank in ranks]
