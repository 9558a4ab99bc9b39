"""Groups that other launchers start for real, and weft's own launcher over an agent.

    launchers_test.py JOIN_SAMPLE

A launcher that is not installed is skipped, and the reason is printed.
"""
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import unittest

WEFT = os.environ["WEFT"]
SAMPLE = sys.argv.pop(1)
SYSTEM_PYTHON = "/usr/bin/python3"  # Debian's torch belongs to it
SECRET = "5ec2e7" * 10 + "abcd"


def clean_environment(**added):
    """Without what the launcher of this test itself may have set."""
    mine = ("WEFT_", "OMPI_", "PMI", "MPI_", "SLURM_", "HOROVOD_", "DMLC_", "TORCHELASTIC_")
    plain = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(mine) and name not in plain}
    return {**kept, **added}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def installed(*command):
    """Whether a command can be started and succeeds."""
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


class Launched(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def environment(self, **added):
        """Of a user without a session, whose files for temporary things are in the folder."""
        environment = clean_environment(TMPDIR=self.folder, HOME=self.folder)
        environment.pop("XDG_RUNTIME_DIR", None)
        return {**environment, **added}

    def start(self, command, **added):
        environment = self.environment(**{"WEFT_SECRET": SECRET, **added})
        return subprocess.run(command, capture_output=True, text=True, timeout=100,
                              env=environment, cwd=self.folder)

    def expect_group(self, run, launcher, ranks):
        self.assertEqual(run.returncode, 0, run.stderr)
        answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        self.assertEqual(sorted(answer["rank"] for answer in answers), list(range(ranks)))
        for answer in answers:
            self.assertEqual(answer["launcher"], launcher)
            self.assertEqual(answer["size"], ranks)
            self.assertEqual(answer["local_size"], ranks)
            self.assertEqual(answer["local_rank"], answer["rank"])
            self.assertEqual(answer["sum"], ranks * (ranks + 1) / 2)
        return answers


class Torchrun(Launched):
    def test_starts_a_group(self):
        if not installed(SYSTEM_PYTHON, "-c", "import torch.distributed.run"):
            self.skipTest("python3-torch is not installed")
        command = ["env", "-u", "WEFT_SECRET", SAMPLE]  # on one host none need be given
        # Nothing is redirected: torch 1.13 on Python 3.11 cannot say so for all ranks, but it can
        # redirect a rank that is not there.
        run = self.start([SYSTEM_PYTHON, "-m", "torch.distributed.run", "--standalone",
                          "--redirects", "9:1", "--tee", "9:1", "--nproc_per_node", "3",
                          "--no_python", *command])
        self.expect_group(run, "torchrun", 3)


class OpenMpi(Launched):
    MPIRUN = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]

    def setUp(self):
        super().setUp()
        if not shutil.which("mpirun.openmpi"):
            self.skipTest("openmpi-bin is not installed")

    def test_starts_a_group(self):
        answers = self.expect_group(self.start([*self.MPIRUN, "-n", "3", SAMPLE]), "Open MPI", 3)
        self.assertTrue(answers[0]["rendezvous"].startswith(f"file:{self.folder}/weft-"))

    def test_on_one_host_the_secret_may_be_left_out(self):
        run = self.start([*self.MPIRUN, "-n", "2", "env", "-u", "WEFT_SECRET", SAMPLE])
        self.expect_group(run, "Open MPI", 2)
        self.assertNotIn("WEFT_SECRET", run.stderr)
        own = os.path.join(self.folder, f"weft-{os.geteuid()}")
        self.assertEqual(stat.S_IMODE(os.stat(own).st_mode), 0o700)
        self.assertEqual(stat.S_IMODE(os.stat(os.path.join(own, "secret")).st_mode), 0o600)

    def test_on_several_hosts_the_secret_may_not_be_left_out(self):
        run = self.start([*self.MPIRUN, "-n", "2", "env", "-u", "WEFT_SECRET",
                          "OMPI_COMM_WORLD_LOCAL_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0",
                          f"WEFT_RENDEZVOUS=127.0.0.1:{free_port()}", SAMPLE])
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("mpirun -x WEFT_SECRET", run.stderr)

    def test_without_a_common_host_says_what_to_set(self):
        run = self.start([*self.MPIRUN, "-n", "2", "env", "OMPI_COMM_WORLD_LOCAL_SIZE=1",
                          "OMPI_COMM_WORLD_LOCAL_RANK=0", SAMPLE])
        self.assertNotEqual(run.returncode, 0)
        self.assertIn("WEFT_RENDEZVOUS is not set", run.stderr)


class Mpich(Launched):
    def setUp(self):
        super().setUp()
        if not shutil.which("mpiexec.mpich"):
            self.skipTest("mpich is not installed")

    def test_starts_a_group(self):
        run = self.start(["mpiexec.mpich", "-n", "3", SAMPLE])
        answers = self.expect_group(run, "MPICH", 3)
        self.assertTrue(answers[0]["rendezvous"].startswith(f"file:{self.folder}/weft-"))

    def test_finds_the_job_from_below_a_shell(self):
        run = self.start(["mpiexec.mpich", "-n", "2", "sh", "-c", f"{SAMPLE}; exit $?"])
        self.expect_group(run, "MPICH", 2)

    def test_two_jobs_at_once_do_not_meet(self):
        environment = self.environment()
        jobs = [subprocess.Popen(["mpiexec.mpich", "-n", "2", SAMPLE], env=environment, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        for job in jobs:
            out, err = job.communicate(timeout=100)
            self.expect_group(subprocess.CompletedProcess("", job.returncode, out, err), "MPICH", 2)


class Variables(Launched):
    """Launchers that only set variables: the test sets them as they would."""

    def start_ranks(self, ranks, variables):
        jobs = [subprocess.Popen([SAMPLE], text=True, stdout=subprocess.PIPE,
                                 stderr=subprocess.PIPE,
                                 env=self.environment(WEFT_SECRET=SECRET, **variables(rank)))
                for rank in range(ranks)]
        out, err, codes = "", "", []
        for job in jobs:
            printed = job.communicate(timeout=100)
            out, err = out + printed[0], err + printed[1]
            codes.append(job.returncode)
        return subprocess.CompletedProcess("", max(codes), out, err)

    def test_horovod(self):
        port = free_port()
        run = self.start_ranks(2, lambda rank: {
            "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": str(rank),
            "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port - 1)})
        answers = self.expect_group(run, "Horovod", 2)
        self.assertEqual(answers[0]["rendezvous"], f"127.0.0.1:{port}")

    def test_dmlc(self):
        port = free_port()
        run = self.start_ranks(2, lambda rank: {
            "DMLC_ROLE": "worker", "DMLC_WORKER_ID": str(rank), "DMLC_NUM_WORKER": "2",
            "BYTEPS_LOCAL_RANK": str(rank), "BYTEPS_LOCAL_SIZE": "2",
            "DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port - 1)})
        self.expect_group(run, "DMLC", 2)
        run = self.start_ranks(1, lambda rank: {"DMLC_ROLE": "server"})
        self.assertIn('DMLC_ROLE is "server"', run.stderr)


MASK = (1 << 64) - 1


def computed_secret(job):
    """What weft once made of a job's public numbers when it had no secret."""
    def rotated(value, by):
        return (value << by | value >> (64 - by)) & MASK

    secret = ""
    for part in range(1, 5):
        seed = 0xcbf29ce484222325 ^ (part * 0x9e3779b97f4a7c15 & MASK)
        for byte in job.encode():
            seed = (seed ^ byte) * 0x100000001b3 & MASK
        seed = (seed + 2 * 0x9e3779b97f4a7c15) & MASK  # the second word of the state counts
        word = (seed ^ seed >> 30) * 0xbf58476d1ce4e5b9 & MASK
        word = (word ^ word >> 27) * 0x94d049bb133111eb & MASK
        word ^= word >> 31
        secret += f"{rotated(word * 5 & MASK, 7) * 9 & MASK:016x}"
    return secret


class Stranger(Launched):
    """Somebody who can see what torchrun tells its ranks, but is not this user."""

    def torchrun(self, rank, port, local_size):
        return {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0" if local_size == 1 else
                str(rank), "LOCAL_WORLD_SIZE": str(local_size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port - 1), "TORCHELASTIC_RUN_ID": "none",
                "TORCHELASTIC_RESTART_COUNT": "0"}

    def popen(self, **variables):
        job = subprocess.Popen([SAMPLE], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=self.environment(**variables))

        def end():
            job.kill()
            job.wait()
            job.stdout.close()
            job.stderr.close()

        self.addCleanup(end)
        return job

    def as_rank_1(self, port):
        """The stranger, who poses as a rank that has not come yet, with what he can compute."""
        job = ("TORCHELASTIC_RUN_ID=none;TORCHELASTIC_RESTART_COUNT=0;MASTER_ADDR=127.0.0.1;"
               f"MASTER_PORT={port - 1};WORLD_SIZE=2;")
        return self.popen(WEFT_RANK="1", WEFT_SIZE="2", WEFT_RENDEZVOUS=f"127.0.0.1:{port}",
                          WEFT_SECRET=computed_secret(job))

    def test_is_not_let_in_by_what_he_can_compute(self):
        port = free_port()
        first = self.popen(**self.torchrun(0, port, 2))
        stranger = self.as_rank_1(port)
        with self.assertRaises(subprocess.TimeoutExpired, msg="the stranger was let in"):
            stranger.communicate(timeout=3)
        stranger.kill()
        second = self.popen(**self.torchrun(1, port, 2))
        for rank, job in enumerate((first, second)):
            out, err = job.communicate(timeout=60)
            self.assertEqual(job.returncode, 0, err)
            self.assertEqual((json.loads(out)["rank"], json.loads(out)["sum"]), (rank, 3))
            if rank == 0:
                self.assertIn("does not know the job's secret", err)

    def test_would_be_let_in_where_the_job_is_allowed_to_be_insecure(self):
        # What is refused above is the real thing: here the same stranger gets in, and is warned of.
        port = free_port()
        first = self.popen(WEFT_INSECURE="1", **self.torchrun(0, port, 1))
        stranger = self.as_rank_1(port)
        out, err = first.communicate(timeout=60)
        self.assertEqual(first.returncode, 0, err)
        self.assertEqual(json.loads(out)["sum"], 3)
        self.assertIn("WEFT_INSECURE is 1", err)
        self.assertEqual(stranger.wait(timeout=60), 0)

    def test_on_several_hosts_nobody_joins_without_a_secret(self):
        job = self.popen(**self.torchrun(0, free_port(), 1))
        self.assertIn("export WEFT_SECRET=$(openssl rand -hex 32)", job.communicate(timeout=60)[1])
        self.assertNotEqual(job.returncode, 0)


# Runs the command here, whatever the host, as ssh would: through a shell. Says what ps would show.
AGENT = """#!/bin/sh
host=$1
shift
echo "$host: $*" >> "{folder}/calls"
cd /
exec env -i PATH="$PATH" HOME="$HOME" sh -c "$*"
"""


class Agent(Launched):
    def setUp(self):
        super().setUp()
        self.agent = os.path.join(self.folder, "agent")
        with open(self.agent, "w", encoding="utf-8") as file:
            file.write(AGENT.format(folder=self.folder))
        os.chmod(self.agent, stat.S_IRWXU)

    def weft_run(self, *arguments, **added):
        return self.start([WEFT, "run", "--agent", self.agent, *arguments], **added)

    def path(self, name):
        return os.path.join(self.folder, name)

    def content(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def wait_for(self, name, lines=1):
        for _ in range(1000):
            if os.path.exists(self.path(name)) and len(self.content(name).splitlines()) >= lines:
                return
            time.sleep(0.01)
        self.fail(f"{name} has not appeared")

    def expect_gone(self, pid):
        for _ in range(1000):
            try:
                with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                    if file.read().rsplit(")", 1)[1].split()[0] in "ZX":
                        return
            except OSError:
                return
            time.sleep(0.01)
        self.fail(f"process {pid} is still there")

    def test_starts_a_group_on_other_hosts(self):
        run = self.weft_run("-H", "a.invalid:2,localhost:1", "--rendezvous",
                            f"127.0.0.1:{free_port()}", "--no-prefix", "--", SAMPLE)
        self.assertEqual(run.returncode, 0, run.stderr)
        answers = [json.loads(line) for line in run.stdout.splitlines()]
        self.assertEqual({answer["sum"] for answer in answers}, {6})
        self.assertEqual(sorted((a["rank"], a["local_rank"], a["local_size"]) for a in answers),
                         [(0, 0, 2), (1, 1, 2), (2, 0, 1)])

    def test_hands_over_folder_and_environment_but_no_secret_in_words(self):
        script = ('echo "$WEFT_RANK $PWD $MINE ${#WEFT_SECRET} $1"; '
                  'tr "\\0" " " < /proc/$PPID/cmdline')
        run = self.weft_run("-H", "a.invalid:1", "-x", "MINE", "--", "sh", "-c", script, "sh",
                            "two  'words'", MINE="my value")
        self.assertEqual(run.returncode, 0, run.stderr)
        lines = run.stdout.splitlines()
        self.assertEqual(lines[0], f"[0] 0 {self.folder} my value 64 two  'words'")
        self.assertEqual(self.content("calls"), f"a.invalid: {WEFT} remote-child\n")
        self.assertIn("remote-child", lines[1])

    def test_hands_over_nothing_that_is_not_on_the_list(self):
        names = ["AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "LD_PRELOAD", "WEFT_HOST"]
        run = self.weft_run("-H", "a.invalid:1", "--no-prefix", "-x", "GIVEN=yes", "--", "env",
                            OMP_NUM_THREADS="3", **{name: "" for name in names})
        self.assertEqual(run.returncode, 0, run.stderr)
        there = dict(line.split("=", 1) for line in run.stdout.splitlines() if "=" in line)
        for name in names:
            self.assertNotIn(name, there)
        self.assertEqual((there["OMP_NUM_THREADS"], there["GIVEN"]), ("3", "yes"))

    def test_one_failure_ends_all_and_is_named(self):
        run = self.weft_run("-H", "a.invalid,b.invalid,localhost", "--", "sh", "-c",
                            "[ $WEFT_RANK = 1 ] && exit 9; echo $$ >> pids; exec sleep 300")
        self.assertEqual(run.returncode, 3)
        self.assertIn("rank 1 on b.invalid exited with code 9", run.stderr)
        for pid in self.content("pids").split() if os.path.exists(self.path("pids")) else []:
            self.expect_gone(pid)

    def start_sleepers(self, script="echo $$ >> pids; exec sleep 300"):
        job = subprocess.Popen([WEFT, "run", "--agent", self.agent, "-H", "a.invalid:2", "--", "sh",
                                "-c", script], cwd=self.folder, env=clean_environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.wait_for("pids", 2)
        return job

    def test_signals_arrive(self):
        job = self.start_sleepers("trap 'echo int >> got; exit 0' INT; echo $$ >> pids; "
                                  "while :; do sleep 0.05; done")
        job.send_signal(signal.SIGINT)
        self.assertIn("ended by signal 2", job.communicate(timeout=60)[1])
        self.assertEqual(self.content("got"), "int\nint\n")

    def test_all_die_with_the_launcher(self):
        job = self.start_sleepers()
        job.kill()
        job.communicate(timeout=60)
        for pid in self.content("pids").split():
            self.expect_gone(pid)

    def test_a_program_that_is_not_there_is_named(self):
        run = self.weft_run("-H", "a.invalid", "--", "/absent/program")
        self.assertEqual(run.returncode, 3)
        self.assertIn('there is no program "/absent/program"', run.stderr)
        self.assertIn("exited with code 127", run.stderr)

    def test_the_doctor_looks_at_other_hosts(self):
        run = self.start([WEFT, "doctor", "--hosts", "localhost,a.invalid", "--agent", self.agent,
                          "--json"])
        checks = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
        self.assertEqual(checks["localhost"]["verdict"], "ok", checks["localhost"])
        self.assertIn("round trip", checks["localhost clock"]["found"])
        self.assertIn("4 flows", checks["localhost rate"]["found"])
        self.assertEqual(checks["a.invalid name"]["verdict"], "problem")
        self.assertIn("/etc/hosts", checks["a.invalid name"]["remedy"])
        self.assertEqual(run.returncode, 3)
        self.assertIn("must be fixed", run.stderr)

    def test_garbage_is_no_start(self):
        for verb in ("remote-child", "doctor-peer"):
            run = subprocess.run([WEFT, verb], input="garbage\n", capture_output=True, text=True,
                                 timeout=60)
            self.assertNotEqual(run.returncode, 0)
            self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)


class Ssh(Launched):
    def test_starts_a_group(self):
        if not installed("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "127.0.0.1",
                         "true"):
            self.skipTest("no ssh server that lets this user in without a password")
        # Another address of this host, so that it is not taken for the host itself.
        run = self.start([WEFT, "run", "-H", "127.0.0.2:2", "--no-prefix", "--rendezvous",
                          f"127.0.0.1:{free_port()}", "--agent", "ssh -o StrictHostKeyChecking=no",
                          "--", SAMPLE])
        self.expect_group(run, "weft", 2)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
