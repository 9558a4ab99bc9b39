"""The lab from the outside: exact sums under any plan, what is recorded, what is refused."""
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import unittest

from lab_support import WEFT, lab


def random_plan(seed):
    rng = random.Random(seed)

    def size(low, high):
        return f"{rng.randint(low, high)}KiB"

    plan = {
        "weft_plan": 1,
        "name": f"random {seed}",
        "bucket_rule": {"first": size(64, 8000), "size": size(64, 60000)},
        "order": rng.choice(["layer", "ready"]),
        "barrier": rng.choice(["all", "tensor"]),
        "lanes": rng.randint(1, 8),
        "chunk": size(64, 4000),
    }
    if rng.random() < 0.6:
        plan["partition"] = size(500, 20000)
    if rng.random() < 0.6:
        plan["credit"] = size(500, 40000)
    return plan


class Lab(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-lab-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.run_folder = os.path.join(self.folder, "run")

    def write_plan(self, plan):
        path = os.path.join(self.folder, "plan.json")
        with open(path, "w") as file:
            json.dump(plan, file)
        return path

    def good(self, *arguments, **options):
        run = lab(self.run_folder, *arguments, **options)
        self.assertEqual(run.returncode, 0, run.stderr)
        return json.loads(run.stdout)

    def info(self, path=None):
        run = subprocess.run([WEFT, "info", "--json", path or self.run_folder],
                             capture_output=True, text=True, timeout=60)
        self.assertEqual(run.returncode, 0, run.stderr)
        return json.loads(run.stdout)

    def refused(self, words, *arguments, code=1, folder_made=False):
        run = lab(self.run_folder, *arguments)
        self.assertEqual((run.returncode, run.stdout), (code, ""), run.stderr)
        self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)
        self.assertTrue(run.stderr.startswith("weft lab run: "), run.stderr)
        self.assertIn(words, run.stderr)
        self.assertEqual(os.path.exists(self.run_folder), folder_made)


class Sums(Lab):
    def test_are_exact_under_random_plans_on_2_to_5_hosts(self):
        for seed in range(12):
            hosts = 2 + seed % 4
            plan = random_plan(seed)
            with self.subTest(seed=seed, hosts=hosts, plan=plan):
                answer = self.good("--hosts", str(hosts), "--iterations", "4", "--no-probe",
                                   "--seed", str(seed), "--plan", self.write_plan(plan))
                self.assertIs(answer["sums_exact"], True)
                self.assertEqual(answer["plan"], plan["name"])
                self.assertEqual(answer["hosts"], hosts)
                self.assertEqual(len(answer["iterations_ms"]), 2)
                shutil.rmtree(self.run_folder)


class Records(Lab):
    def test_hold_the_slow_rank_the_wrong_clock_and_the_probe(self):
        answer = self.good("--hosts", "3", "--iterations", "4", "--slow", "2:0.5", "--clock",
                           "1:+250ms:+50ppm", "--plan", "ddp")
        self.assertTrue(answer["sums_exact"])
        info = self.info()
        self.assertEqual(info["ranks"], 3)
        self.assertEqual(info["missing_ranks"], [])
        self.assertEqual(info["damage"], [])
        self.assertEqual(info["lab"]["slow_rank_2"], "0.5")
        self.assertIn("250000000 ns", info["lab"]["clock_rank_1"])
        self.assertIn("+50 ppm", info["lab"]["clock_rank_1"])
        self.assertEqual((info["dilation"], info["shrink"]), (60, 60))
        self.assertTrue(info["emulated_compute"])
        self.assertEqual(info["plan"]["name"], "ddp")
        self.assertEqual(info["model"]["name"], "alexnet")
        for process in info["processes"]:
            self.assertEqual(process["dropped"], 0)
            self.assertGreater(process["events"], 100)
            self.assertGreater(process["probe"], 0)
        rates = {(row["scope"], row["flows"]) for row in info["probe"] if row["type"] == "rate"}
        for scope in ("ring", "pair"):
            self.assertIn((scope, 1), rates)
            self.assertIn((scope, 8), rates)

    def test_are_left_out_when_asked(self):
        self.good("--hosts", "2", "--iterations", "3", "--no-probe", "--no-record")
        self.assertEqual(os.listdir(self.run_folder), ["run.json"])

    def test_say_what_a_truncated_file_lost(self):
        self.good("--hosts", "2", "--iterations", "4", "--no-probe")
        path = os.path.join(self.run_folder, "rank-1.weft")
        whole = self.info()["processes"][1]["events"]
        size = os.path.getsize(path)
        os.truncate(path, size * 2 // 3)
        info = self.info()
        (damage,) = info["damage"]
        self.assertTrue(damage["file"].endswith("rank-1.weft"))
        self.assertTrue(damage["damaged"])
        self.assertTrue(damage["unfinished"])
        self.assertTrue(damage["details"])
        self.assertLess(info["processes"][1]["events"], whole)
        self.assertGreater(info["processes"][1]["events"], 0)
        run = subprocess.run([WEFT, "info", self.run_folder], capture_output=True, text=True,
                             timeout=60)
        self.assertEqual(run.returncode, 0)
        self.assertIn("rank-1.weft: damaged", run.stdout)
        # The beginning alone says nothing that could be trusted, and the other file is whole.
        os.truncate(path, 10)
        info = self.info()
        self.assertEqual([process["rank"] for process in info["processes"]], [0])
        self.assertEqual(info["missing_ranks"], [1])


class Compute(Lab):
    def test_alone_takes_the_time_of_the_model(self):
        answer = self.good("--hosts", "2", "--iterations", "8", "--compute-only")
        # Within 1 % on a quiet machine, which the machine of a test need not be.
        self.assertGreater(answer["iteration_ms"], 0.99 * answer["compute_ms"])
        if answer["steal_percent"] <= 10:
            self.assertLess(answer["iteration_ms"], 1.03 * answer["compute_ms"])
        self.assertEqual(answer["wire_ms"], 0)


class Refusals(Lab):
    def test_of_names_that_do_not_exist(self):
        self.refused("did you mean 'alexnet'?", "--model", "alexnets")
        self.refused('did you mean "ddp"?', "--plan", "ddq")
        self.refused("9:0.5", "--slow", "9:0.5")
        self.refused("rank 4", "--clock", "4:+1ms")
        self.refused("of the form RANK:SPEED", "--slow", "two:0.5")
        self.refused("2:-1", "--slow", "2:-1")
        self.refused("iterations", "--iterations", "2")
        self.refused("hosts", "--hosts", "1000")
        self.refused("--engine", "--engine", "mpi", code=2)
        self.refused("--dilation", "--dilation", "0.1", code=2)

    def test_of_a_plan_that_cannot_be_carried_out_before_anything_starts(self):
        self.refused('/codec: "qsgd" is not supported', "--plan",
                     self.write_plan({"weft_plan": 1, "name": "small", "codec": "qsgd"}))
        self.refused('no tensor "nothing"', "--plan", self.write_plan(
            {"weft_plan": 1, "name": "odd", "buckets": [{"tensors": ["nothing"]}]}))
        self.refused("/lanes", "--plan",
                     self.write_plan({"weft_plan": 1, "name": "none", "lanes": 0}))

    def test_of_a_folder_that_holds_something(self):
        os.mkdir(self.run_folder)
        precious = os.path.join(self.run_folder, "precious")
        with open(precious, "w") as file:
            file.write("kept")
        self.refused("is not empty", folder_made=True)
        with open(precious) as file:
            self.assertEqual(file.read(), "kept")

    def test_of_a_folder_that_cannot_be_made(self):
        run = lab("/proc/no/run")
        self.assertIn(run.returncode, (1, 3))
        self.assertIn("cannot make /proc/no/run", run.stderr)


class OrdinaryUser(Lab):
    @unittest.skipUnless(os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv")
    def test_needs_no_root(self):
        os.chmod(self.folder, 0o777)
        nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        if subprocess.run([*nobody, WEFT, "--version"], capture_output=True).returncode != 0:
            self.skipTest("an ordinary user may not read the program")
        answer = self.good("--hosts", "3", "--iterations", "3", "--no-probe", prefix=nobody)
        self.assertTrue(answer["sums_exact"])
        if answer["confinement"] == "loopback":
            self.skipTest("user namespaces are forbidden here")
        self.assertEqual(answer["confinement"], "user_namespaces")
        self.assertEqual(os.stat(os.path.join(self.run_folder, "rank-2.weft")).st_uid, 65534)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
