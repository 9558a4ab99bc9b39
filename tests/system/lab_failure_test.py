"""A worker, the user or the kernel ends a lab in the middle: who is named, and what is left."""
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from lab_support import devices, lab_command, processes_of, wait_for, workers_of

HOSTS = 4


class Death(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-lab-death-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.run_folder = os.path.join(self.folder, "run")
        self.devices = devices()

    def start(self, *arguments):
        """A run that would go on for minutes, once all of its ranks exchange gradients."""
        self.lab = subprocess.Popen(
            lab_command(self.run_folder, "--hosts", str(HOSTS), "--iterations", "2000",
                        "--no-probe", *arguments),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(self.lab.kill)
        traces = [os.path.join(self.run_folder, f"rank-{rank}.weft") for rank in range(HOSTS)]
        self.assertTrue(wait_for(lambda: len(workers_of(self.run_folder)) == HOSTS and all(
            os.path.exists(path) and os.path.getsize(path) > 50000 for path in traces), 30))
        return workers_of(self.run_folder)

    def ended(self, since, seconds=2.0):
        """Waits for the lab; its exit code and words."""
        out, err = self.lab.communicate(timeout=20)
        took = time.monotonic() - since
        self.assertLess(took, seconds, err)
        self.assertEqual(out, "")
        return self.lab.returncode, err

    def expect_nothing_left(self):
        self.assertTrue(wait_for(lambda: not processes_of(self.run_folder), 2),
                        processes_of(self.run_folder))
        self.assertEqual(devices(), self.devices)

    def test_of_a_worker_is_told_by_all_others(self):
        for victim, plan in ((2, "default"), (0, "ddp")):
            with self.subTest(victim=victim):
                workers = self.start("--plan", plan)
                since = time.monotonic()
                os.kill(workers[victim], signal.SIGKILL)
                code, words = self.ended(since)
                self.assertEqual(code, 3)
                self.assertEqual(len(words.splitlines()), 1, words)
                self.assertTrue(words.startswith(
                    f"weft lab run: rank {victim} was killed by signal 9 (Killed) after "), words)
                for rank in set(range(HOSTS)) - {victim}:
                    self.assertRegex(words, rf"rank {rank} exited with code 3 [^:]* later: "
                                     rf"rank {victim} on host{victim} is lost")
                    with open(os.path.join(self.run_folder, f"rank-{rank}.log")) as log:
                        self.assertIn(f"rank {victim} on host{victim} is lost", log.read())
                    self.assertLess(self.latest(words, rank), 2000)
                self.expect_nothing_left()
                shutil.rmtree(self.run_folder)

    @staticmethod
    def latest(words, rank):
        """How long after the victim a rank ended, in milliseconds."""
        value, unit = re.search(rf"rank {rank} exited with code 3 ([-\d.]+) (\w+) later",
                                words).groups()
        return float(value) * {"ns": 1e-6, "us": 1e-3, "ms": 1, "s": 1000}[unit]

    def test_of_a_worker_that_hangs_is_told_too(self):
        workers = self.start()
        os.kill(workers[3], signal.SIGSTOP)
        time.sleep(0.3)
        self.assertIsNone(self.lab.poll(), "a pause is no failure")
        os.kill(workers[3], signal.SIGCONT)
        time.sleep(0.3)
        self.assertIsNone(self.lab.poll())
        since = time.monotonic()
        os.kill(workers[3], signal.SIGSTOP)
        os.kill(workers[1], signal.SIGKILL)
        # The one that is stopped cannot end by itself: the lab does it after its patience.
        code, words = self.ended(since, 8)
        self.assertEqual(code, 3)
        self.assertIn("rank 1 was killed by signal 9", words)
        self.expect_nothing_left()

    def test_by_ctrl_c_and_by_being_asked_to_end(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(signal=number):
                self.start()
                since = time.monotonic()
                self.lab.send_signal(number)
                code, words = self.ended(since)
                self.assertEqual(code, 3)
                self.assertEqual(len(words.splitlines()), 1, words)
                self.assertIn(f"ended by signal {int(number)}", words)
                self.expect_nothing_left()
                shutil.rmtree(self.run_folder)

    def test_of_the_lab_itself_takes_everything_with_it(self):
        self.start()
        since = time.monotonic()
        self.lab.send_signal(signal.SIGKILL)
        code, _ = self.ended(since)
        self.assertEqual(code, -signal.SIGKILL)
        self.expect_nothing_left()
        self.assertLess(time.monotonic() - since, 2)
        # What was recorded until then can be read.
        info = subprocess.run([os.environ["WEFT"], "info", self.run_folder], capture_output=True,
                              text=True, timeout=60)
        self.assertEqual(info.returncode, 0, info.stderr)
        self.assertIn("rank-0.weft: damaged", info.stdout)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
