"""weft lab run over other systems: the same job, the same answer, exact sums."""
import json
import os
import re
import shutil
import subprocess
import tempfile
import unittest

from lab_support import WEFT, lab_command, skip_without_namespaces

# Nothing is installed by a test.
ENVIRONMENT = dict(os.environ, WEFT_SKIP_SETUP="1")


class Engines(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-engines-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def lab(self, engine, *arguments, environment=ENVIRONMENT):
        folder = os.path.join(self.folder, engine + "-run")
        run = subprocess.run(lab_command(folder, "--engine", engine, *arguments),
                             capture_output=True, text=True, timeout=120, env=environment)
        return run, folder

    def expect_a_right_job(self, engine):
        run, folder = self.lab(engine, "--hosts", "3", "--iterations", "4", "--plan", "ddp")
        if run.returncode != 0 and "is not to be had here" in run.stderr:
            self.skipTest(run.stderr.strip())
        self.assertEqual(run.returncode, 0, run.stderr)
        answer = json.loads(run.stdout)
        self.assertEqual(answer["engine"], engine)
        self.assertIs(answer["sums_exact"], True)
        self.assertEqual(len(answer["iterations_ms"]), 2)
        self.assertGreaterEqual(answer["iteration_ms"], 0.99 * answer["compute_ms"])
        left = [name for name in os.listdir(folder) if name.startswith("rank-")]
        self.assertEqual([name for name in left if not name.endswith(".log")], [])

    def test_gloo(self):
        self.expect_a_right_job("gloo")

    def test_openmpi(self):
        self.expect_a_right_job("openmpi")

    def test_horovod(self):
        self.expect_a_right_job("horovod")

    def test_one_that_is_not_there_is_said_to_be_absent_before_anything_starts(self):
        environment = dict(ENVIRONMENT, WEFT_PEERS=os.path.join(self.folder, "none"))
        run, folder = self.lab("horovod", environment=environment)
        self.assertEqual((run.returncode, run.stdout), (1, ""), run.stderr)
        self.assertIn("weft lab run: horovod is not to be had here: ", run.stderr)
        self.assertFalse(os.path.exists(folder))


class Packages(unittest.TestCase):
    """What peers are installed from or built with, in the two places that say so."""

    def setUp(self):
        self.source = os.environ["WEFT_SOURCE_DIR"]

    def text(self, name):
        with open(os.path.join(self.source, name), encoding="utf-8") as file:
            return file.read().replace("\\\n", " ")

    def test_of_horovod_hold_the_headers_that_it_is_built_with(self):
        wanted = re.search(r"packages horovod ([^|]*)\|\|", self.text("src/lab/peers.sh"))[1].split()
        for name in ("libtorch-dev", "pybind11-dev", "python3-dev", "libopenmpi-dev"):
            self.assertIn(name, wanted)
        # What every build needs comes first in tools/setup.
        setup = self.text("tools/setup")
        known = set(re.search(r"required=\(([^)]*)\)", setup)[1].split())
        known |= set(re.search(r"for_bench\(\) \{.*?optional\+=\(([^)]*)\)", setup, re.S)[1].split())
        self.assertEqual(set(wanted) - known, set())


if __name__ == "__main__":
    skip_without_namespaces()
    unittest.main()
