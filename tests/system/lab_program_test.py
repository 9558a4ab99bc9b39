"""weft lab run -- PROGRAM: real ranks on the lab's hosts, what they are told, what is refused.

    lab_program_test.py TRAINING    a program of examples/
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

WEFT = os.environ["WEFT"]
TRAINING = sys.argv.pop(1)
SMALL = [TRAINING, "--columns", "60000", "--layers", "4", "--batch", "4", "--steps", "6"]


def run(*words, timeout=120, **variables):
    return subprocess.run([WEFT, "lab", "run", *words], capture_output=True, text=True,
                          timeout=timeout, env={**os.environ, **variables})


def namespaces():
    """Whether hosts can be had here."""
    done = run("--hosts", "1", "--", "true")
    return "forbids namespaces" not in done.stderr


class Program(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-lab-program-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.run_folder = os.path.join(self.folder, "run")

    def good(self, *words, **variables):
        done = run("--json", *words, **variables)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout), done.stderr

    def refused(self, words, *call, code=2):
        done = run(*call)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
        self.assertIn(words, done.stderr)
        self.assertFalse(os.path.exists(self.run_folder))


class Hosts(Program):
    def setUp(self):
        if not namespaces():
            self.skipTest("the system forbids namespaces")
        super().setUp()

    def test_ranks_know_who_they_are_and_where(self):
        script = ("echo $WEFT_RANK/$WEFT_SIZE $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE "
                  "$MASTER_ADDR $GLOO_SOCKET_IFNAME $(uname -n) $ASKED")
        answer, said = self.good("--hosts", "2", "--ranks-per-host", "2", "-x", "ASKED=yes",
                                 "--", "sh", "-c", script)
        self.assertEqual(sorted(line for line in said.splitlines() if line.startswith("[")), [
            "[0] 0/4 0/4 0/2 10.77.0.1 eth0 host0 yes", "[1] 1/4 1/4 1/2 10.77.0.1 eth0 host0 yes",
            "[2] 2/4 2/4 0/2 10.77.0.1 eth0 host1 yes", "[3] 3/4 3/4 1/2 10.77.0.1 eth0 host1 yes"])
        self.assertEqual((answer["ok"], answer["ranks"], answer["hosts"]), (True, 4, 2))
        self.assertEqual([one["exit_code"] for one in answer["outcomes"]], [0] * 4)
        self.assertIsNone(answer["run"])

    def test_a_real_job_trains_over_the_asked_links_and_is_recorded(self):
        answer, said = self.good("--hosts", "2", "--link", "200mbit", "--flow", "50mbit",
                                 "--plan", "horovod", "-o", self.run_folder, "--", *SMALL)
        self.assertEqual(said.count("as if one rank had trained on all data"), 2)
        self.assertEqual(answer["run"], self.run_folder)
        info = json.loads(subprocess.run([WEFT, "info", "--json", self.run_folder], check=True,
                                         capture_output=True, text=True).stdout)
        self.assertEqual((info["ranks"], info["plan"]["name"]), (2, "horovod"))
        done = subprocess.run([WEFT, "diagnose", "--json", self.run_folder], capture_output=True,
                              text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        # One lane, and what a flow may carry: a real program meets the lab's limits.
        found = [one["name"] for one in json.loads(done.stdout)["findings"]]
        self.assertIn("one_flow_limit", found)

    def test_the_loop_runs_on_it(self):
        done = subprocess.run(
            [WEFT, "loop", "-o", os.path.join(self.folder, "loop"), "--json", "--before", "ddp",
             "--budget", "1s", "--", WEFT, "lab", "run", "--hosts", "2", "--link", "200mbit",
             "--flow", "50mbit", "--", *SMALL], capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        answer = json.loads(done.stdout)
        self.assertEqual((answer["ranks"], answer["before"]["plan"]), (2, "ddp"))
        self.assertTrue(answer["decisions"])

    def test_a_rank_that_fails_ends_the_job_and_is_named(self):
        done = run("--hosts", "2", "--", "sh", "-c", "[ $RANK = 0 ] && exec sleep 60; exit 7",
                   timeout=30)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertIn("rank 1", done.stderr)
        self.assertIn("code 7", done.stderr)

    def test_a_program_that_takes_too_long_is_ended(self):
        done = run("--hosts", "1", "--timeout", "500ms", "--", "sleep", "60", timeout=30)
        self.assertEqual(done.returncode, 3, done.stderr)

    def test_says_that_there_is_no_such_program(self):
        done = run("--hosts", "2", "--", "no-such-program-of-weft")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("no-such-program-of-weft", done.stderr)

    def test_leaves_what_is_in_a_folder_alone(self):
        with open(os.path.join(self.folder, "mine"), "w"):
            pass
        done = run("-o", self.folder, "--", "true")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("not an empty folder", done.stderr)


class Refused(Program):
    def test_what_is_for_models_alone(self):
        for option in ["--model", "vgg16"], ["--slow", "0:0.5"], ["--burn"], ["--dilation", "2"]:
            self.refused(option[0], *option, "-o", self.run_folder, "--", "true")

    def test_what_is_for_programs_alone(self):
        self.refused("--timeout", "--timeout", "1s", "--model", "vgg16", "-o", self.run_folder)

    def test_nothing_to_run(self):
        self.refused("--model", "-o", self.run_folder)
        self.refused("-o", "--model", "vgg16")

    def test_hosts_that_cannot_be_had(self):
        done = run("--", "true", WEFT_LAB_CONFINEMENT="loopback")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("forbids namespaces", done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
