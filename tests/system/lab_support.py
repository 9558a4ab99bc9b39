"""What the tests of the lab share: runs that are small, and a look at what they leave behind."""
import json
import os
import subprocess
import sys
import tempfile
import time

WEFT = os.environ["WEFT"]
# An iteration of about 0.2 s, whose numbers say nothing about a cluster and everything about
# whether the job is right.
SMALL = {"--model": "alexnet", "--dilation": "60", "--shrink": "60"}


def lab_command(folder, *arguments):
    small = [word for option, value in SMALL.items() if option not in arguments
             for word in (option, value)]
    return [WEFT, "lab", "run", "--json", *small, "-o", folder, *arguments]


def lab(folder, *arguments, prefix=(), timeout=60):
    return subprocess.run([*prefix, *lab_command(folder, *arguments)], capture_output=True,
                          text=True, timeout=timeout)


def skip_without_namespaces():
    """Ends the test as skipped where the lab has no network of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run = lab(folder + "/run", "--hosts", "2", "--iterations", "3", "--no-probe")
        if run.returncode == 0 and json.loads(run.stdout)["confinement"] == "loopback":
            print("skipped: namespaces are forbidden here")
            sys.exit(77)


def processes_of(folder):
    """Processes that have the folder in their command line, with their words."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                words = file.read().decode(errors="replace").split("\0")
            with open(f"/proc/{entry}/stat") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z" and any(folder in word for word in words):
            found[int(entry)] = words
    return found


def workers_of(folder):
    """The worker processes of a run, by rank."""
    workers = {}
    for pid, words in processes_of(folder).items():
        for word in words:
            name = os.path.basename(word)
            if "worker" in words and name.startswith("rank-") and name.endswith(".job.json"):
                workers[int(name.split("-")[1].split(".")[0])] = pid
    return workers


def devices():
    return sorted(os.listdir("/sys/class/net"))


def wait_for(condition, seconds):
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
