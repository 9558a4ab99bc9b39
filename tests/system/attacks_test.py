"""Every row of docs/attacks.md names a test that exists, and the tool can tell what a test told."""
import os
import subprocess
import sys
import unittest

TOOL = os.path.join(os.environ["WEFT_SOURCE_DIR"], "tools", "attacks")


def attacks(*words):
    return subprocess.run([sys.executable, TOOL, *words], capture_output=True, text=True, timeout=120)


class Attacks(unittest.TestCase):
    def test_every_row_has_a_test(self):
        done = attacks("--check")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, r"^[1-9][0-9]+ rows, all with a test")

    def test_a_row_is_carried_out(self):
        done = attacks("-k", "bracket")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| so it was, in ", done.stdout)
        self.assertIn("1 passed, 0 failed", done.stderr)


if __name__ == "__main__":
    unittest.main()
