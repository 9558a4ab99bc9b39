"""Hostile traces, plans and models through every verb that reads one.

Whatever a file says, a verb ends by itself with 0 to 3 and not by a signal, takes no more than a
second of processor time for each MiB it was given, and no more memory than ten times as much and
256 MiB. Each change comes from a number, which a failure names, and is made again with it.

    hostile_files_test.py TRACE_SAMPLE COUNT [FIRST]      the numbers FIRST to FIRST + COUNT - 1
"""
import collections
import concurrent.futures
import os
import pathlib
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time

try:
    import hostile_support as hostile
except ImportError as error:
    print(f"skipped: {error}; tools/setup installs it", file=sys.stderr)
    sys.exit(77)

WEFT = os.environ["WEFT"]
SOURCE = pathlib.Path(os.environ["WEFT_SOURCE_DIR"])
MIB = 1 << 20
# To start, on a machine that does other things.
START_SECONDS = 2.0
HANGS_AFTER = 60  # of wall time

Call = collections.namedtuple("Call", "words code seconds peak stderr")


def run(words, folder, address_space=None):
    """How a call ends, with the processor time and the memory that it took."""
    def limit():
        if address_space is not None:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    with open(os.path.join(folder, "stderr"), "w+b") as errors:
        process = subprocess.Popen([WEFT, *words], stdin=subprocess.DEVNULL, stderr=errors,
                                   stdout=subprocess.DEVNULL, cwd=folder,
                                   preexec_fn=limit if address_space is not None else None)
        deadline = time.monotonic() + HANGS_AFTER
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                process.kill()
            time.sleep(0.002)
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        said = errors.read(2000).decode(errors="replace")
    return Call(words, process.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024,
                said)


def faults_of(call, size):
    """What is wrong with how a call ended that read `size` bytes."""
    seconds = START_SECONDS + size / MIB
    memory = 256 * MIB + 10 * size
    if call.code not in (0, 1, 2, 3):
        yield f"ended with {call.code}"
    if call.seconds > seconds:
        yield f"took {call.seconds:.2f} s of processor time, allowed are {seconds:.2f}"
    if call.peak > memory:
        yield f"took {call.peak / MIB:.0f} MiB, allowed are {memory / MIB:.0f}"
    if call.code in (1, 2, 3) and not call.stderr.strip():
        yield f"ended with {call.code} without a word"


class Seeds:
    """What the changes begin with: files that weft itself wrote."""

    def __init__(self, trace_sample, folder):
        sample = os.path.join(folder, "sample")
        subprocess.run([trace_sample, sample, "2"], check=True, timeout=60)
        corpus = SOURCE / "src/analysis/corpus/analysis"
        self.runs = [[pathlib.Path(sample, f"rank-{rank}.weft").read_bytes() for rank in range(3)]]
        for name in ("measured.weft", "predicted.weft"):
            data = (corpus / name).read_bytes()
            self.runs.append([hostile.File(data).as_rank(rank, 2).packed() for rank in range(2)])
        self.files = [file for files in self.runs for file in files]
        self.plans = [(SOURCE / "src/plan/corpus/plan" / name).read_bytes()
                      for name in ("full.json", "least.json", "null.json")]
        self.models = [(SOURCE / "src/lab/corpus/model/small.json").read_bytes(),
                       (SOURCE / "src/lab/models/alexnet.json").read_bytes()]
        self.whole = os.path.join(folder, "whole")
        write_run(self.whole, self.runs[1])


def write_run(folder, files):
    os.mkdir(folder)
    for rank, data in enumerate(files):
        with open(os.path.join(folder, f"rank-{rank}.weft"), "wb") as file:
            file.write(data)


def try_trace(rng, seeds, folder):
    files = list(rng.choice([seeds.runs[0], seeds.runs[1], seeds.runs[1], seeds.runs[2]]))
    chosen = rng.randrange(len(files))
    files[chosen], name = hostile.change_trace(rng, files[chosen], seeds.files, seeds.plans)
    if name in hostile.OF_ALL_RANKS:
        # All files alike, or they only contradict each other.
        files = [hostile.File(files[chosen]).as_rank(rank, len(files)).packed()
                 if rng.random() < 0.9 else files[rank] for rank in range(len(files))]
    write_run(os.path.join(folder, "run"), files)
    size = sum(map(len, files))
    one = f"run/rank-{chosen}.weft"
    json = ["--json"] if rng.random() < 0.5 else []
    verbs = [["info", "run", *json], ["info", one], ["export", one, "-o", "one.json"],
             ["export", "run", "-o", "all.json", *rng.choice([[], ["--target-time"]])],
             ["export", "run", "--to", "npy", "-o", "arrays", *rng.choice([[], ["--target-time"]])],
             ["align", "run", *json], ["align", "run", "-o", "aligned"],
             ["diagnose", "run", *json], ["replay", "run", *json],
             ["replay", "run", "--plan", "default", "--set", "hosts=3", "-o", "predicted"],
             ["optimize", "run", "--budget", "100ms", "-o", "plan.json"],
             ["report", "run", "-o", "page.html"], ["report", seeds.whole, "run", "-o", "two.html"],
             ["diff", "run", seeds.whole, *json], ["diff", seeds.whole, "run"]]
    verbs += [["show", rng.choice(["run", one]), "--by", by, *json]
              for by in ("iteration", "layer", "tensor", "lane", "peer", "kind")]
    return name, size, verbs


def write(folder, name, data):
    with open(os.path.join(folder, name), "wb") as file:
        file.write(data)


def try_plan(rng, seeds, folder):
    plan = hostile.change_plan(rng, rng.choice(seeds.plans))
    write(folder, "plan.json", plan)
    verbs = [["plan", "check", "plan.json"], ["plan", "check", "plan.json", "--json"],
             ["plan", "show", "plan.json"], ["plan", "show", "plan.json", "--json"],
             ["plan", "diff", "plan.json", "default"],
             ["plan", "diff", "ddp", "plan.json", "--json"],
             ["replay", seeds.whole, "--plan", "plan.json"],
             ["report", seeds.whole, "--plan", "plan.json", "-o", "page.html"]]
    return "plan", len(plan), verbs


def try_model(rng, seeds, folder):
    model = hostile.change_weft_model(rng, rng.choice(seeds.models))
    write(folder, "model.json", model)
    # A lab would begin with a model that it takes, so it is asked for factors that it refuses next.
    asked = ["--model", "./model.json", "--dilation", "1", "--shrink", "2", "-o", "lab"]
    verbs = [["lab", "models", "model.json"], ["lab", "models", "model.json", "--json"],
             ["lab", "run", *asked], ["lab", "loop", *asked]]
    return "model", len(model), verbs


def attempt(number, seeds, above):
    """One change through every verb that reads such a file; the faults that were seen."""
    rng = random.Random(number)
    make = (try_trace, try_trace, try_trace, try_plan, try_model)[number % 5]
    folder = tempfile.mkdtemp(prefix=f"{number}-", dir=above)
    try:
        name, size, verbs = make(rng, seeds, folder)
        calls = [run(words, folder) for words in verbs]
        faults = [(call, fault) for call in calls for fault in faults_of(call, size)]
        return number, name, size, calls, faults
    finally:
        shutil.rmtree(folder)


def memory_runs_out(trace_sample, folder):
    """Verbs with less memory than a run asks for: each ends with words, wherever it happens."""
    large = os.path.join(folder, "large")
    subprocess.run([trace_sample, large, "1500"], check=True, timeout=60)
    # Enough to start.
    least = 8 * MIB
    while run(["--version"], folder, least).code != 0:
        least += MIB
    faulty = 0
    for words in (["info", large], ["show", large, "--by", "kind"],
                  ["export", large, "-o", "large.json"], ["align", large], ["diagnose", large],
                  ["report", large, "-o", "large.html"], ["diff", large, large]):
        refused, space = 0, least
        while True:
            call = run(words, folder, space)
            if call.code == 0 or "memory" not in call.stderr:
                break
            faulty += call.code not in (1, 3)
            refused += 1
            space = int(space * 1.04) + MIB // 4
        # With enough of it, the verb says what it says of this run without a limit.
        usual = run(words, folder)
        if (call.code, call.stderr) != (usual.code, usual.stderr) or refused == 0:
            faulty += 1
            print(f"FAULT weft {' '.join(words)}, {space / MIB:.0f} MiB: {call}", flush=True)
        print(f"memory: weft {words[0]} was refused it {refused} times, and ended with {call.code}"
              f" in {space / MIB:.0f} MiB")
    return faulty


def main():
    trace_sample, count = sys.argv[1], int(sys.argv[2])
    first = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    # What a crash leaves behind is of no use here, and large.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulty, calls_of, codes, slowest = 0, collections.Counter(), collections.Counter(), []
    with tempfile.TemporaryDirectory(prefix="weft-hostile-test-") as above:
        seeds = Seeds(trace_sample, above)
        for words in (["info", seeds.whole], ["diagnose", seeds.whole],
                      ["report", seeds.whole, "-o", "page.html"]):
            call = run(words, above)
            assert call.code == 0, f"the seed itself is not read: {call}"
        faulty += memory_runs_out(trace_sample, above)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, name, size, calls, faults in pool.map(
                    lambda number: attempt(number, seeds, above), range(first, first + count)):
                calls_of[name] += len(calls)
                codes.update(call.code for call in calls)
                slowest += [(call.seconds, number, name, size, call.words) for call in calls]
                slowest = sorted(slowest, reverse=True)[:3]
                for call, fault in faults:
                    faulty += 1
                    print(f"FAULT {number} ({name}, {size} bytes): weft {' '.join(call.words)}:"
                          f" {fault}\n      {call.stderr.strip()[:300]}", flush=True)
    print("calls:", ", ".join(f"{name} {n}" for name, n in sorted(calls_of.items())))
    print("exit codes:", dict(sorted(codes.items())))
    for seconds, number, name, size, words in slowest:
        print(f"slowest: {seconds:.2f} s, {number} ({name}, {size} bytes): weft {' '.join(words)}")
    print(f"{count} changed files, {sum(calls_of.values())} calls, {faulty} faults")
    # A harness that is always refused at the door would prove nothing.
    assert codes[0] > sum(codes.values()) // 20, codes
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
