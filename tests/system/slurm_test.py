"""A group that Slurm starts for real: one node, with its own configuration and daemons.

    slurm_test.py JOIN_SAMPLE

The daemons run as this user, from a temporary folder, on free ports, and end with the test.
"""
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import unittest

SAMPLE = sys.argv.pop(1)
NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sinfo", "sbatch")
PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"

CONFIGURATION = """
ClusterName=weft
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Cluster:
    """munged, slurmctld and slurmd of this host, in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.daemons = []
        self.host = socket.gethostname().split(".")[0]
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.startswith(("SLURM_", "WEFT_", "PMI", "OMPI_"))}
        # Ranks agree on a secret in a folder of their user's: here one that goes with the test.
        self.environment.pop("XDG_RUNTIME_DIR", None)
        self.environment.update(PATH=PATH, SLURM_CONF=f"{folder}/slurm.conf", TMPDIR=folder)

    def start(self):
        for name in ("state", "spool"):
            os.mkdir(f"{self.folder}/{name}", 0o700)
        with open(f"{self.folder}/munge.key", "wb") as file:
            file.write(os.urandom(1024))
        os.chmod(file.name, 0o600)
        with open(f"{self.folder}/slurm.conf", "w", encoding="utf-8") as file:
            file.write(CONFIGURATION.format(
                folder=self.folder, host=self.host, user=getpass.getuser(),
                controller_port=free_port(), node_port=free_port()))
        # --force, because a temporary folder lies below one that others may write to.
        self.run("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket",
                 f"--key-file={self.folder}/munge.key", f"--pid-file={self.folder}/munge.pid",
                 f"--log-file={self.folder}/munge.log", f"--seed-file={self.folder}/munge.seed")
        self.wait(lambda: os.path.exists(f"{self.folder}/munge.socket"), "munged")
        self.run("slurmctld", "-D", "-i")
        self.run("slurmd", "-D", "-N", self.host)
        self.wait(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%T").stdout, "an idle node")

    def run(self, *command):
        with open(f"{self.folder}/{command[0]}.out", "wb") as out:
            self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=out,
                                                 stderr=out, stdin=subprocess.DEVNULL))

    def ask(self, *command, timeout=60):
        return subprocess.run(command, env=self.environment, capture_output=True, text=True,
                              timeout=timeout, cwd=self.folder)

    def wait(self, condition, what):
        until = time.monotonic() + 40
        while not condition():
            if time.monotonic() > until or any(d.poll() is not None for d in self.daemons):
                raise RuntimeError(f"Slurm did not start: no {what}\n{self.complaints()}")
            time.sleep(0.1)

    def complaints(self):
        text = ""
        for name in sorted(os.listdir(self.folder)):
            if name.endswith((".log", ".out")):
                with open(f"{self.folder}/{name}", encoding="utf-8", errors="replace") as file:
                    text += f"--- {name}\n" + "".join(file.readlines()[-15:])
        return text

    def stop(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


class Slurm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory(prefix="weft-slurm-")
        cls.addClassCleanup(temporary.cleanup)
        cls.cluster = Cluster(temporary.name)
        cls.addClassCleanup(cls.cluster.stop)
        cls.cluster.start()

    def expect_group(self, run, ranks):
        self.assertEqual(run.returncode, 0, run.stderr + self.cluster.complaints())
        answers = [json.loads(line) for line in run.stdout.splitlines()]
        self.assertEqual(sorted(answer["rank"] for answer in answers), list(range(ranks)))
        for answer in answers:
            self.assertEqual(answer["launcher"], "Slurm")
            self.assertEqual(answer["size"], ranks)
            self.assertEqual(answer["local_size"], ranks)
            self.assertEqual(answer["local_rank"], answer["rank"])
            self.assertEqual(answer["sum"], ranks * (ranks + 1) / 2)
            self.assertTrue(answer["rendezvous"].startswith(self.cluster.host + ":"))
        return answers

    def test_srun_starts_a_group(self):
        self.expect_group(self.cluster.ask("srun", "-n", "3", SAMPLE), 3)

    def test_a_step_may_be_smaller_than_its_job(self):
        script = f"#!/bin/sh\nsrun -n 2 {SAMPLE}\nsrun -n 4 {SAMPLE}\n{SAMPLE}\n"
        path = os.path.join(self.cluster.folder, "job.sh")
        with open(path, "w", encoding="utf-8") as file:
            file.write(script)
        run = self.cluster.ask("sbatch", "--wait", "-n", "4", "-o", "job.txt", "-e", "job.err",
                               path)
        with open(os.path.join(self.cluster.folder, "job.txt"), encoding="utf-8") as file:
            answers = [json.loads(line) for line in file]
        with open(os.path.join(self.cluster.folder, "job.err"), encoding="utf-8") as file:
            errors = file.read()
        self.assertEqual(sorted(answer["size"] for answer in answers), [2, 2, 4, 4, 4, 4], errors)
        self.assertEqual(len({answer["rendezvous"] for answer in answers}), 2)
        # The script itself is no rank, though it has SLURM_PROCID.
        self.assertIn("nobody started this process as a rank", errors)
        self.assertNotEqual(run.returncode, 0)


if __name__ == "__main__":
    absent = [name for name in NEEDED if not shutil.which(name, path=PATH)]
    if absent:
        print("skipped: Slurm is not installed (slurm-wlm, munge): no " + ", ".join(absent))
        sys.exit(77)
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
