#!/usr/bin/env python3
"""weft loop on examples/torch/train.py, two ranks: with attach(), without it, and what goes wrong.

How fast the training becomes is not asserted, nor how well it was predicted: its compute is real,
and the machine of a test is busy.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

WEFT = os.environ["WEFT"]
TRAIN = os.path.join(os.environ["WEFT_SOURCE_DIR"], "examples", "torch", "train.py")
STEPS = 9
# What DDP obeys of a plan.
OBEYED = {"/lanes", "/lane_worker", "/lane_workers", "/chunk", "/algorithm"}


def torchrun(script, *words):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            script, *words]


def train(*words):
    return [TRAIN, "--model", "transformer", "--steps", str(STEPS), "--batch", "2", *words]


class Loop(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="weft-torch-loop-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.done = {}

    def loop(self, name, command, *options):
        """Runs it once; what became of the program, and where it wrote."""
        out = os.path.join(self.folder, name)
        if name not in self.done:
            self.done[name] = subprocess.run(
                [WEFT, "loop", "-o", out, "--json", "--budget", "2s", "--timeout", "200s", *options,
                 "--", *command], capture_output=True, text=True, timeout=280,
                env={**os.environ, "WEFT_SHARED_MEMORY": "0"})
        return self.done[name], out

    def answer(self, name, command, *options):
        done, out = self.loop(name, command, *options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout), out

    def attached(self):
        return self.answer("attached", torchrun(*train()), "--before", "ddp")

    def plain(self):
        return self.answer("plain", [WEFT, "run", "-n", "2", "--", sys.executable, *train("--ddp")])

    def refused(self, name, command):
        done, _ = self.loop(name, command)
        self.assertEqual(done.stdout, "")
        return done.returncode, done.stderr.strip().splitlines()[-1]

    def test_measures_what_the_training_took_and_keeps_the_faster(self):
        for how in self.attached, self.plain:
            answer, _ = how()
            self.assertEqual(answer["ranks"], 2)
            before, after = answer["before"], answer["after"]
            self.assertAlmostEqual(answer["speedup"], before["iteration_ms"] / after["iteration_ms"],
                                   places=6)
            self.assertEqual(answer["kept_old"], not answer["decisions"]
                             or after["iteration_ms"] >= before["iteration_ms"])
            with open(answer["paths"]["plan"]) as file:
                kept = json.load(file)
            name = (before if answer["kept_old"] else after)["plan"]
            self.assertEqual(kept["name"], name)

    def test_a_plan_decides_everything_where_weft_is_attached(self):
        answer, _ = self.attached()
        self.assertFalse(answer["framework_cuts"])
        self.assertIsNone(answer["attached"])
        self.assertEqual(answer["before"]["plan"], "ddp")
        self.assertEqual(answer["before"]["iterations"], STEPS - 2)

    def test_of_a_plan_only_what_ddp_obeys_is_searched(self):
        answer, _ = self.plain()
        self.assertTrue(answer["framework_cuts"])
        self.assertLessEqual({one["field"] for one in answer["decisions"]}, OBEYED)
        said = " ".join(answer["remarks"])
        self.assertIn("keeps its own buckets", said)
        if answer["attached"]:
            self.assertIn("weft.torch.attach(model, optimizer)", said)
            self.assertLess(answer["attached"]["iteration_ms"], answer["predicted"]["iteration_ms"])

    def test_the_page_has_the_models_own_modules(self):
        for how in self.attached, self.plain:
            answer, _ = how()
            with open(answer["paths"]["report"]) as file:
                page = file.read()
            for module in "words", "layers.layers.3.linear2", "head":
                self.assertTrue(f">{module}<" in page, module)
            shown = subprocess.run([WEFT, "show", answer["paths"]["after"], "--by", "layer"],
                                   capture_output=True, text=True, timeout=60)
            self.assertEqual(shown.returncode, 0, shown.stderr)
            self.assertIn("layers.layers.3.linear2", shown.stdout)

    def test_says_what_a_script_did_not_do(self):
        status, words = self.refused("short", torchrun(*train("--steps", "4")))
        self.assertEqual(status, 1, words)
        self.assertIn("more steps", words)
        status, words = self.refused("nothing", torchrun(self.script("print('no training here')")))
        self.assertEqual(status, 1, words)
        self.assertIn('init_process_group("weft")', words)

    def test_says_how_a_script_failed(self):
        status, words = self.refused("failed", torchrun(self.script("raise SystemExit(7)")))
        self.assertEqual(status, 3, words)
        self.assertIn("exited with code 1", words)  # torchrun's own
        self.assertFalse(os.path.exists(os.path.join(self.folder, "failed", "plan.json")))

    def script(self, text):
        path = os.path.join(self.folder, f"script-{abs(hash(text))}.py")
        with open(path, "w") as file:
            file.write(text + "\n")
        return path


if __name__ == "__main__":
    unittest.main(verbosity=2)
