"""weft loop on a real program, examples/training: the object, the files, and what it refuses.

    program_loop_test.py TRAINING ALLREDUCE UNMARKED    programs of examples/, and one beside this

How fast the program becomes is not asserted, nor how well it was predicted: its compute is real, and
the machine of a test is busy.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

WEFT = os.environ["WEFT"]
TRAINING, ALLREDUCE, UNMARKED = sys.argv[1:4]
del sys.argv[1:4]

SMALL = ["--columns", "60000", "--layers", "4", "--batch", "4", "--steps", "9"]


def loop(folder, *command, options=(), environment=None):
    return subprocess.run([WEFT, "loop", "-o", folder, "--budget", "2s", *options, "--", *command],
                          capture_output=True, text=True, timeout=120,
                          env={**os.environ, **(environment or {})})


def ranks(count, *program):
    return [WEFT, "run", "-n", str(count), "--timeout", "60s", "--", *program]


class Loop(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="weft-program-loop-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.out = os.path.join(cls.folder, "loop")
        cls.done = loop(cls.out, *ranks(2, TRAINING, *SMALL), options=["--json", "--before", "ddp"],
                       environment={"WEFT_SHARED_MEMORY": "0"})
        assert cls.done.returncode == 0, cls.done.stderr
        cls.answer = json.loads(cls.done.stdout)

    def path(self, *parts):
        return os.path.join(self.folder, *parts)

    def test_says_what_it_did(self):
        answer = self.answer
        self.assertEqual(answer["ranks"], 2)
        self.assertEqual(answer["before"]["plan"], "ddp")
        for side in "before", "after", "predicted":
            self.assertLess(0, answer[side]["low"])
            self.assertLessEqual(answer[side]["low"], answer[side]["iteration_ms"])
            self.assertLessEqual(answer[side]["iteration_ms"], answer[side]["high"])
        for side in "before", "after":
            self.assertEqual(answer[side]["iterations"], 7)
            self.assertLess(0, answer[side]["seconds"])
        self.assertIn("weft loop: running ", self.done.stderr)
        # What the program prints is not in the way of the object.
        self.assertIn("as if one rank had trained on all data", self.done.stderr)
        self.assertEqual(self.done.stderr.count("as if one rank"),
                         4 if answer["decisions"] else 2)

    def test_does_the_arithmetic_and_keeps_the_faster(self):
        answer = self.answer
        before, after, predicted = (answer[side]["iteration_ms"]
                                    for side in ("before", "after", "predicted"))
        self.assertAlmostEqual(answer["speedup"], before / after, places=6)
        self.assertAlmostEqual(answer["prediction_error_percent"],
                               100 * (predicted - after) / after, places=6)
        self.assertEqual(answer["kept_old"], after > before or not answer["decisions"])
        with open(answer["paths"]["plan"]) as file:
            kept = json.load(file)
        self.assertEqual(kept["name"] == "ddp", answer["kept_old"])
        self.assertEqual(os.path.exists(self.path("loop", "rejected.json")),
                         answer["kept_old"] and bool(answer["decisions"]))
        with open(self.path("loop", "loop.json")) as file:
            self.assertEqual(json.load(file), answer)

    def test_every_verb_of_analysis_understands_the_runs(self):
        for run in "before", "after", "predicted":
            folder = self.answer["paths"][run]
            page = self.path(f"{run}.html")
            verbs = [["align", folder], ["report", folder, "-o", page], ["info", folder],
                     ["show", folder, "--by", "layer"]]
            if run != "predicted":  # which says nothing of the network that it was not told
                verbs += [["replay", folder], ["diagnose", folder],
                          ["optimize", folder, "--budget", "1s", "-o", self.path("again.json")]]
            for words in verbs:
                with self.subTest(verb=words):
                    done = subprocess.run([WEFT, *words], capture_output=True, text=True,
                                          timeout=60)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertNotIn("inferred", done.stdout)
            with open(page) as file:
                self.assertIn("layer 3", file.read())

    def test_the_plan_is_what_the_second_run_was_under(self):
        if not self.answer["decisions"]:
            self.skipTest("no better plan was found")
        info = json.loads(subprocess.run([WEFT, "info", self.answer["paths"]["after"], "--json"],
                                         capture_output=True, text=True, check=True).stdout)
        self.assertEqual(info["plan"]["name"], self.answer["after"]["plan"])

    def refused(self, name, *command, **more):
        done = loop(self.path(name), *command, **more)
        self.assertEqual(len(done.stderr.strip().splitlines()[-1:]), 1)
        return done.returncode, done.stderr.strip().splitlines()[-1]

    def test_says_what_to_do_about_a_program_that_records_nothing(self):
        code, message = self.refused("nothing", "true")
        self.assertEqual(code, 1)
        self.assertIn("recorded nothing", message)
        self.assertIn("WEFT_TRACE", message)

    def test_says_what_a_program_did_not_mark(self):
        for name, program in ("no-model", [ALLREDUCE]), ("no-compute", [UNMARKED, "exchange"]):
            code, message = self.refused(name, *ranks(2, *program))
            self.assertEqual(code, 1)
            self.assertIn("weft/mark.h", message)

    def test_says_how_the_program_failed(self):
        code, message = self.refused("failed", "sh", "-c", "exit 7")
        self.assertEqual(code, 3)
        self.assertIn("exited with code 7", message)
        code, message = self.refused("absent", "no-such-program-of-weft")
        self.assertEqual(code, 1)
        self.assertIn("no-such-program-of-weft", message)
        code, message = self.refused("slow", "sleep", "50", options=["--timeout", "300ms"])
        self.assertEqual(code, 3)
        self.assertIn("did not end within 300", message)

    def test_notices_a_program_that_names_a_plan_itself(self):
        code, message = self.refused(
            "stubborn", *ranks(2, "env", "WEFT_PLAN=ddp", TRAINING, *SMALL),
            environment={"WEFT_SHARED_MEMORY": "0"})
        if code == 0:
            self.skipTest("no better plan was found")
        self.assertEqual(code, 1)
        self.assertIn("hand WEFT_PLAN on", message)

    def test_overwrites_nothing(self):
        code, message = self.refused("loop", "true")
        self.assertEqual(code, 1)
        self.assertIn("not an empty folder", message)


class Inferred(unittest.TestCase):
    """What a program did not mark is found out, or refused by name."""

    def record(self, how):
        folder = tempfile.mkdtemp(prefix="weft-unmarked-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        subprocess.run(ranks(2, UNMARKED, how), check=True, capture_output=True, timeout=60,
                       env={**os.environ, "WEFT_TRACE": folder, "WEFT_SHARED_MEMORY": "0"})
        show = subprocess.run([WEFT, "show", folder, "--by", "iteration"], capture_output=True,
                              text=True, timeout=60)
        self.assertEqual(show.returncode, 0, show.stderr)
        diagnose = subprocess.run([WEFT, "diagnose", folder], capture_output=True, text=True,
                                  timeout=60)
        return show, diagnose

    def test_steps_of_an_exchange(self):
        show, diagnose = self.record("exchange")
        self.assertIn("inferred: each begins with the first gradient of a step", show.stderr)
        self.assertRegex(show.stdout, r"(?m)^6 ")
        self.assertEqual(diagnose.returncode, 1)
        self.assertIn("no forward and no backward of any layer", diagnose.stderr)

    def test_repetition_of_what_is_called(self):
        show, diagnose = self.record("calls")
        self.assertIn("inferred: 4 operations repeat", show.stderr)
        self.assertRegex(show.stdout, r"(?m)^6 ")
        self.assertEqual(diagnose.returncode, 1)
        self.assertIn("no model", diagnose.stderr)

    def test_compute_without_iterations_is_enough(self):
        show, diagnose = self.record("compute")
        self.assertIn('inferred: each begins with the forward of "layer 0"', show.stderr)
        self.assertEqual(diagnose.returncode, 0, diagnose.stderr)
        self.assertIn("iterations are inferred", diagnose.stdout)
        self.assertIn("inferred from the size of its gradients", diagnose.stdout.replace("\n", " "))


if __name__ == "__main__":
    unittest.main(verbosity=2)
