"""The verbs of analysis from the outside, on short real runs: what they say, and what they refuse."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from claims_support import TRIES, is_sound, self_replay_bound, unsound
from lab_support import WEFT, lab

CLUSTER = ["--hosts", "3", "--flow", "5gbit", "--iterations", "6"]
OFFSET_NS, DRIFT_PPM = 250_000_000, 50


def weft(*arguments, timeout=60):
    return subprocess.run([WEFT, *arguments], capture_output=True, text=True, timeout=timeout)


class Runs:
    """Recorded once, used by all tests, changed by none."""

    folder = None

    @classmethod
    def make(cls):
        cls.folder = tempfile.mkdtemp(prefix="weft-analysis-test-")
        for attempt in range(TRIES):
            cls.ddp = cls.record(f"ddp{attempt}", "--plan", "ddp", "--clock",
                                 f"1:+{OFFSET_NS // 1_000_000}ms:+{DRIFT_PPM}ppm")
            cls.ddp_answer = cls.answer
            if is_sound(cls.answer):
                break
        cls.default = cls.record("default", "--plan", "default")
        cls.no_probe = cls.record("no-probe", "--plan", "ddp", "--no-probe")
        cls.compute = cls.record("compute", "--compute-only")
        cls.slow = cls.record("slow", "--plan", "default", "--slow", "2:0.2")

    @classmethod
    def record(cls, name, *arguments):
        path = os.path.join(cls.folder, name)
        run = lab(path, *CLUSTER, *arguments)
        assert run.returncode == 0, run.stderr
        cls.answer = json.loads(run.stdout)
        return path


def setUpModule():
    Runs.make()


def tearDownModule():
    shutil.rmtree(Runs.folder, ignore_errors=True)


class Analysis(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-analysis-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def ask(self, *arguments):
        run = weft(*arguments, "--json")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(run.stderr, "")
        return json.loads(run.stdout)

    def say(self, *arguments):
        run = weft(*arguments)
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout

    def refused(self, words, *arguments, code=1):
        run = weft(*arguments)
        self.assertEqual((run.returncode, run.stdout), (code, ""), run.stderr)
        self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)
        self.assertTrue(run.stderr.startswith(f"weft {arguments[0]}: "), run.stderr)
        self.assertIn(words, run.stderr)

    def verbs(self, run):
        """Every verb that reads a run, called with this one."""
        return (["align", run], ["replay", run], ["diagnose", run],
                ["optimize", run, "--budget", "1s", "-o", self.path("plan.json")],
                ["diff", run, Runs.default], ["report", run, "-o", self.path("page.html")])

    def one_interval(self, interval):
        self.assertLessEqual(interval["low"], interval["iteration_ms"])
        self.assertLessEqual(interval["iteration_ms"], interval["high"])
        self.assertGreater(interval["low"], 0)


class Align(Analysis):
    def test_finds_the_clock_that_was_set_wrong(self):
        answer = self.ask("align", Runs.ddp)
        self.assertEqual(answer["hosts"][0]["quality"], "reference")
        host = answer["hosts"][1]
        self.assertEqual(host["quality"], "bounded")
        # The clock began to drift with its process, a moment before the first record.
        slack = DRIFT_PPM * 1e-6 * 5e9
        self.assertLessEqual(host["low_ns"], OFFSET_NS + slack)
        self.assertGreaterEqual(host["high_ns"], OFFSET_NS)
        self.assertLessEqual(host["high_ns"] - host["low_ns"], 1e6)
        self.assertLessEqual(host["low_ns"], host["offset_ns"])
        self.assertLessEqual(host["offset_ns"], host["high_ns"])
        self.assertGreater(answer["messages"], 100)
        self.assertGreater(answer["backward_before"], 0)
        self.assertEqual(answer["backward_after"], 0)

    def test_leaves_right_clocks_where_they_are(self):
        for host in self.ask("align", Runs.default)["hosts"]:
            self.assertLessEqual(host["low_ns"], 0)
            self.assertGreaterEqual(host["high_ns"], 0)
            self.assertLessEqual(host["high_ns"] - host["low_ns"], 1e6)

    def test_writes_a_run_that_is_aligned(self):
        out = self.path("aligned")
        self.assertEqual(self.ask("align", Runs.ddp, "-o", out)["output"], out)
        again = self.ask("align", out)
        self.assertEqual((again["backward_before"], again["backward_after"]), (0, 0))
        self.assertLess(abs(again["hosts"][1]["offset_ns"]), 1e6)
        self.assertAlmostEqual(self.ask("diff", Runs.ddp, out)["change_percent"], 0, delta=1)
        self.refused("is not an empty folder", "align", Runs.ddp, "-o", out)

    def test_says_it_in_words(self):
        said = self.say("align", Runs.ddp)
        self.assertIn("250.", said)
        self.assertIn("received before they were sent", said)


class Replay(Analysis):
    def test_says_how_well_it_replays_before_it_predicts(self):
        answer = self.ask("replay", Runs.ddp, "--plan", "default")
        fidelity = answer["fidelity"]
        self.assertGreater(fidelity["measured_ms"], 0)
        self.assertEqual([row["what"] for row in fidelity["ranks"]], ["rank 0", "rank 1", "rank 2"])
        self.assertIn("forward", [row["what"] for row in fidelity["kinds"]])
        self.one_interval(answer["predicted"])
        self.assertEqual(answer["plan"], "default")
        self.assertLess(answer["predicted"]["iteration_ms"], fidelity["measured_ms"])
        said = self.say("replay", Runs.ddp, "--plan", "default").splitlines()
        self.assertTrue(said[0].startswith("fidelity "), said)
        self.assertTrue(any(line.startswith("predicted ") for line in said), said)

    def test_replays_as_well_as_is_claimed(self):
        if not is_sound(Runs.ddp_answer):
            self.skipTest(unsound(Runs.ddp_answer))
        fidelity = self.ask("replay", Runs.ddp)["fidelity"]
        self.assertLess(abs(fidelity["error_percent"]), self_replay_bound())

    def test_of_the_cluster_that_the_lab_stands_for(self):
        eight, thousand = (self.ask("replay", Runs.ddp, "--set", f"hosts={hosts}") for hosts in (8, 1024))
        for answer in eight, thousand:
            self.one_interval(answer["predicted"])
            self.assertTrue(any("of its own" in line for line in answer["assumed"]), answer["assumed"])
        self.assertIn("one rank stands for all 1024", thousand["assumed"])
        self.assertGreater(thousand["predicted"]["iteration_ms"], eight["predicted"]["iteration_ms"])
        self.assertFalse(any("of its own" in line for line in self.ask("replay", Runs.ddp, "--as-lab")["assumed"]))
        self.refused("ranks fold", "replay", Runs.ddp, "--set", "hosts=1024", "-o", self.path("predicted"))

    def test_of_another_cluster(self):
        slower = self.ask("replay", Runs.default, "--set", "link=5gbit", "--set", "hosts=4")
        self.assertGreater(slower["predicted"]["iteration_ms"],
                           slower["fidelity"]["measured_ms"])
        self.assertIn("4 hosts", slower["cluster"])
        lab = self.ask("replay", Runs.default, "--set", "link=5gbit", "--set", "hosts=4", "--as-lab")
        self.assertIn("in the lab", lab["cluster"])
        self.refused("did you mean link?", "replay", Runs.default, "--set", "lnk=5gbit")
        self.refused("hosts=0", "replay", Runs.default, "--set", "hosts=0")
        self.refused('did you mean "ddp"?', "replay", Runs.default, "--plan", "ddq")

    def test_twice_is_the_same_to_the_byte(self):
        first, second = self.path("first"), self.path("second")
        answers = [self.ask("replay", Runs.ddp, "--plan", "default", "-o", out)
                   for out in (first, second)]
        for answer in answers:
            answer.pop("output")
        self.assertEqual(*answers)
        self.assertEqual(sorted(os.listdir(first)), ["rank-0.weft", "rank-1.weft", "rank-2.weft"])
        for name in os.listdir(first):
            with open(os.path.join(first, name), "rb") as a, \
                    open(os.path.join(second, name), "rb") as b:
                self.assertEqual(a.read(), b.read(), name)

    def test_writes_a_run_like_any_other(self):
        out = self.path("predicted")
        predicted = self.ask("replay", Runs.ddp, "--plan", "default", "-o", out)["predicted"]
        info = self.ask("info", out)
        self.assertEqual((info["plan"]["name"], info["damage"]), ("default", []))
        self.assertEqual(self.ask("show", out, "--by", "iteration")["by"], "iteration")
        self.assertTrue(self.ask("diagnose", out)["predicted"])
        aligned = self.ask("align", out)
        self.assertEqual([host["offset_ns"] for host in aligned["hosts"]], [0, 0, 0])
        self.assertEqual(aligned["backward_after"], 0)
        again = self.ask("replay", out)
        self.assertIn("prediction", " ".join(again["remarks"]))
        self.ask("optimize", out, "--budget", "1s", "-o", self.path("plan.json"))
        difference = self.ask("diff", Runs.ddp, out)
        self.assertEqual([difference[side]["predicted"] for side in ("before", "after")],
                         [False, True])
        self.assertAlmostEqual(difference["after"]["iteration_ms"], predicted["iteration_ms"],
                               delta=0.02 * predicted["iteration_ms"])
        page = self.ask("report", Runs.ddp, out, "-o", self.path("page.html"))
        self.assertEqual([run["label"] for run in page["runs"]], ["before, measured", "predicted"])
        self.ask("report", out, "-o", self.path("alone.html"))


class Diagnose(Analysis):
    KEYS = {"run", "predicted", "plan", "iteration_ms", "path", "communication_ms",
            "overlapped_ms", "overlap_possible_ms", "exposed_ms", "findings", "rejected", "bounds",
            "alternatives", "fidelity_error_percent", "layers", "tensors", "lanes", "remarks"}

    def test_adds_up_to_the_iteration(self):
        answer = self.ask("diagnose", Runs.ddp)
        self.assertEqual(set(answer), self.KEYS)
        self.assertAlmostEqual(sum(share["ms"] for share in answer["path"]),
                               answer["iteration_ms"], delta=0.02 * answer["iteration_ms"])
        self.assertEqual(len(answer["layers"]), 8)
        self.assertTrue(answer["lanes"] and answer["bounds"])

    def test_ranks_its_findings(self):
        answer = self.ask("diagnose", Runs.ddp)
        self.assertIn("one_flow_limit", [finding["name"] for finding in answer["findings"]])
        gains = [finding["gain_percent"] for finding in answer["findings"]]
        self.assertEqual(gains, sorted(gains, reverse=True))
        for finding in answer["findings"]:
            self.assertEqual(set(finding), {"name", "title", "rank", "gain_percent", "low", "high",
                                            "evidence", "remedy"})
            self.assertTrue(finding["evidence"] and finding["remedy"] and finding["title"])

    def test_names_the_slow_rank(self):
        findings = self.ask("diagnose", Runs.slow)["findings"]
        straggler = [finding for finding in findings if finding["name"] == "straggler"]
        self.assertEqual([finding["rank"] for finding in straggler], [2], findings)

    def test_is_short(self):
        said = self.say("diagnose", Runs.ddp)
        self.assertLessEqual(len(said.splitlines()), 45, said)
        self.assertIn("one_flow_limit", said)


class Optimize(Analysis):
    def test_writes_a_plan_that_is_predicted_better(self):
        plan = self.path("plan.json")
        answer = self.ask("optimize", Runs.ddp, "-o", plan, "--budget", "3s", "--seed", "7")
        self.one_interval(answer["after"])
        self.assertLess(answer["after"]["iteration_ms"], answer["before"]["iteration_ms"])
        self.assertTrue(answer["decisions"])
        for decision in answer["decisions"]:
            self.assertTrue(decision["why"], decision)
        self.assertEqual(self.ask("plan", "check", plan)["plans"][0]["hash"], answer["plan_hash"])
        # What the search says of its plan is what replay says of it.
        replayed = self.ask("replay", Runs.ddp, "--plan", plan)
        self.assertAlmostEqual(replayed["predicted"]["iteration_ms"],
                               answer["after"]["iteration_ms"],
                               delta=0.03 * answer["after"]["iteration_ms"])

    def test_leaves_out_what_is_asked(self):
        plan = self.path("plan.json")
        self.ask("optimize", Runs.ddp, "-o", plan, "--budget", "2s", "--without", "lanes")
        with open(plan) as file:
            self.assertEqual(json.load(file)["lanes"], 1)
        self.refused("--without", "optimize", Runs.ddp, "-o", plan, "--without", "magic", code=2)
        self.refused("--budget", "optimize", Runs.ddp, "-o", plan, "--budget", "0s", code=2)
        self.refused("soon", "optimize", Runs.ddp, "-o", plan, "--budget", "soon")


class Diff(Analysis):
    def test_of_a_run_with_itself_is_nothing(self):
        answer = self.ask("diff", Runs.ddp, Runs.ddp)
        self.assertEqual((answer["change_ms"], answer["change_percent"]), (0, 0))
        self.assertEqual(answer["plan_differences"], [])
        for part in "kinds", "ranks", "layer_waits":
            self.assertTrue(answer[part], part)
            for row in answer[part]:
                self.assertEqual(row["change_ms"], 0, row)

    def test_of_two_plans(self):
        answer = self.ask("diff", Runs.ddp, Runs.default)
        self.assertEqual((answer["before"]["plan"], answer["after"]["plan"]), ("ddp", "default"))
        self.assertIn("/lanes", [row["path"] for row in answer["plan_differences"]])
        self.assertLess(answer["change_ms"], 0)
        said = self.say("diff", Runs.ddp, Runs.default)
        self.assertIn("/lanes", said)
        self.assertIn("device stands still", said)


class Report(Analysis):
    def test_is_one_page(self):
        page = self.path("page.html")
        answer = self.ask("report", Runs.ddp, Runs.default, "--plan", "default", "-o", page)
        self.assertEqual([run["label"] for run in answer["runs"]],
                         ["before, measured", "after, measured"])
        with open(page) as file:
            text = file.read()
        self.assertEqual(len(text.encode()), answer["bytes"])
        self.assertIn("alexnet on 3 ranks", text)
        self.assertIn("</html>", text)


class Bench(Analysis):
    def test_tells_the_speed_of_replay(self):
        answer = self.ask("bench", "replay", "--operations", "100000")
        self.assertGreaterEqual(answer["operations"], 100000)
        self.assertGreater(answer["operations_per_second"], 0)
        self.assertGreater(answer["events"], 0)
        self.assertGreater(answer["replay_share_percent"], 0)
        self.assertLessEqual(answer["replay_share_percent"], 100)


class BadInputs(Analysis):
    def test_that_are_no_run(self):
        os.mkdir(self.path("empty"))
        with open(self.path("text"), "w") as file:
            file.write("not a trace\n")
        for name in "nothing", "empty", "text":
            for verb in self.verbs(self.path(name)):
                with self.subTest(verb=verb[0], run=name):
                    self.refused(name, *verb)

    def test_without_one_rank(self):
        run = self.path("run")
        shutil.copytree(Runs.ddp, run)
        os.remove(os.path.join(run, "rank-1.weft"))
        for verb in self.verbs(run)[1:]:
            with self.subTest(verb=verb[0]):
                self.refused("rank 1 is missing", *verb)
        hosts = self.ask("align", run)["hosts"]
        self.assertEqual([host["host_index"] for host in hosts], [0, 2])
        self.refused("name the folder", "diagnose", os.path.join(run, "rank-0.weft"))

    def test_that_are_damaged(self):
        run = self.path("run")
        shutil.copytree(Runs.ddp, run)
        path = os.path.join(run, "rank-1.weft")
        os.truncate(path, os.path.getsize(path) * 3 // 4)
        for verb in self.verbs(run):
            with self.subTest(verb=verb[0]):
                self.assertIn("rank-1.weft", " ".join(self.ask(*verb)["remarks"]))
        # Too little is left of it: it says why the rank is missing.
        os.truncate(path, 100)
        for verb in self.verbs(run)[1:]:
            with self.subTest(verb=verb[0]):
                self.refused("rank-1.weft is damaged", *verb)

    def test_without_a_probe(self):
        for verb in self.verbs(Runs.no_probe)[1:]:
            with self.subTest(verb=verb[0]):
                answer = self.ask(*verb)
                if verb[0] != "diff":
                    self.assertIn("no probe", " ".join(answer["remarks"]))
        answer = self.ask("replay", Runs.no_probe)
        self.assertTrue(answer["unknown"])
        self.refused("the trace has no probe", "replay", Runs.no_probe, "--plan", "default")

    def test_without_communication(self):
        answer = self.ask("diagnose", Runs.compute)
        self.assertEqual(answer["exposed_ms"], 0)
        self.assertIn("moved no gradient", " ".join(answer["remarks"]))
        answer = self.ask("replay", Runs.compute)
        self.assertLess(abs(answer["fidelity"]["error_percent"]), 5)
        for verb in self.verbs(Runs.compute):
            with self.subTest(verb=verb[0]):
                self.ask(*verb)

    def test_places_that_cannot_be_written(self):
        nowhere = "/proc/no/such"
        for arguments in (["align", Runs.ddp, "-o", nowhere], ["replay", Runs.ddp, "-o", nowhere],
                          ["report", Runs.ddp, "-o", nowhere],
                          ["optimize", Runs.ddp, "--budget", "1s", "-o", nowhere]):
            with self.subTest(verb=arguments[0]):
                run = weft(*arguments)
                self.assertIn(run.returncode, (1, 3), run.stderr)
                self.assertIn(nowhere, run.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
