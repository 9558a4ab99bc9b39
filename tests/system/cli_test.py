"""The program from the outside: help, exit codes, near names, one-line errors, --json, pipes.

Verbs are found by reading help, so a new verb is tested without a new line here.
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest

WEFT = os.environ["WEFT"]


def weft(*arguments, **options):
    return subprocess.run([WEFT, *arguments], capture_output=True, text=True, timeout=60, **options)


def verbs(*path):
    """The verbs below a verb, from its help."""
    section = re.search(r"^Verbs:\n((?:  .*\n)+)", weft(*path, "--help").stdout, re.M)
    return re.findall(r"^  ([a-z]\S*)", section.group(1), re.M) if section else []


def all_verbs(path=()):
    for name in verbs(*path):
        yield (*path, name)
        yield from all_verbs((*path, name))


class Help(unittest.TestCase):
    def test_of_every_verb_is_short_and_has_an_example(self):
        found = list(all_verbs())
        self.assertIn(("plan", "check"), found)
        for path in [(), *found]:
            with self.subTest(verb=" ".join(path)):
                run = weft(*path, "--help")
                self.assertEqual(run.returncode, 0)
                self.assertEqual(run.stderr, "")
                example = re.search(r"^Example:\n  weft (.*)$", run.stdout, re.M)
                self.assertTrue(example, run.stdout)
                self.assertTrue(example.group(1).startswith(" ".join(path)), example.group(0))
                self.assertLess(len(run.stdout.splitlines()), 60)
                self.assertEqual(weft(*path, "-h").stdout, run.stdout)

    def test_version(self):
        run = weft("--version")
        self.assertEqual(run.returncode, 0)
        self.assertRegex(run.stdout, r"\Aweft \d+\.\d+\.\d+\n\Z")

    def test_nothing_to_do_shows_help_and_is_a_bad_call(self):
        groups = [()] + [path for path in all_verbs() if verbs(*path)]
        for path in groups:
            with self.subTest(verb=" ".join(path)):
                run = weft(*path)
                self.assertEqual((run.returncode, run.stdout), (2, ""))
                self.assertIn("Verbs:", run.stderr)


class BadCalls(unittest.TestCase):
    def check(self, arguments, expected):
        run = weft(*arguments)
        self.assertEqual((run.returncode, run.stdout), (2, ""), arguments)
        self.assertEqual(run.stderr, expected + "\n")

    def test_unknown_verbs(self):
        self.check(["plans"], 'weft: unknown verb "plans"; did you mean plan?')
        self.check(["plan", "chek", "ddp"], 'weft plan: unknown verb "chek"; did you mean check?')
        self.check(["zzzzzz", "--json"], 'weft: unknown verb "zzzzzz"; see weft --help')

    def test_unknown_options(self):
        self.check(["--vesion"], "weft: unknown option --vesion; did you mean --version?")
        self.check(["plan", "check", "--jsn=1", "ddp"],
                   "weft plan check: unknown option --jsn=1; did you mean --json?")
        self.check(["plan", "check", "ddp", "-x"],
                   "weft plan check: unknown option -x; see weft plan check --help")

    def test_arguments(self):
        self.check(["plan", "check"],
                   "weft plan check: PLAN is required; see weft plan check --help")
        self.check(["plan", "diff", "ddp"],
                   "weft plan diff: AFTER is required; see weft plan diff --help")
        self.check(["plan", "show", "ddp", "more"],
                   'weft plan show: unexpected argument "more"; see weft plan show --help')

    def test_every_verb_refuses_an_unknown_option(self):
        for path in all_verbs():
            with self.subTest(verb=" ".join(path)):
                run = weft(*path, "--no-such-option-at-all")
                self.assertEqual((run.returncode, run.stdout), (2, ""))
                self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)
                self.assertTrue(run.stderr.startswith("weft " + " ".join(path) + ": "), run.stderr)


class BadInput(unittest.TestCase):
    def test_is_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "plan.json")
            with open(path, "w") as file:
                file.write('{\n"weft_plan": 1,\n"na\\nme": 1\n}')
            for verb in (["check", path], ["show", path], ["diff", "ddp", path],
                         ["check", folder], ["show", folder], ["show", path + ".no"]):
                with self.subTest(verb=verb):
                    run = weft("plan", *verb)
                    self.assertEqual((run.returncode, run.stdout), (1, ""))
                    self.assertEqual(len(run.stderr.splitlines()), 1, run.stderr)
                    self.assertTrue(run.stderr.startswith(f"weft plan {verb[0]}: "), run.stderr)

    def test_names_a_near_preset(self):
        run = weft("plan", "show", "horovo")
        self.assertEqual(run.returncode, 1)
        self.assertTrue(run.stderr.endswith('did you mean "horovod"?\n'), run.stderr)


class Json(unittest.TestCase):
    def test_check(self):
        run = weft("plan", "check", "--json", "ddp", "no-such-plan")
        self.assertEqual(run.returncode, 1)
        answer = json.loads(run.stdout)
        self.assertEqual(answer["ok"], False)
        self.assertEqual([plan["ok"] for plan in answer["plans"]], [True, False])
        self.assertIn("no-such-plan", answer["plans"][1]["error"])
        self.assertEqual(len(run.stderr.splitlines()), 1)

    def test_show(self):
        answer = json.loads(weft("plan", "show", "--json", "default").stdout)
        self.assertEqual(answer["plan"], json.loads(weft("plan", "show", "default").stdout))
        self.assertRegex(answer["hash"], r"\A[0-9a-f]{16}\Z")

    def test_diff(self):
        answer = json.loads(weft("plan", "diff", "ddp", "default", "--json").stdout)
        self.assertFalse(answer["same"])
        self.assertIn({"path": "/lanes", "before": "1", "after": "8"}, answer["differences"])
        run = weft("plan", "diff", "ddp", "ddp", "--json")
        self.assertEqual(run.returncode, 0)
        self.assertEqual(json.loads(run.stdout)["differences"], [])


class Plans(unittest.TestCase):
    def test_what_show_prints_is_a_plan(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "my.json")
            for name in ("ddp", "default", "horovod"):
                shown = weft("plan", "show", name).stdout
                with open(path, "w") as file:
                    file.write(shown)
                self.assertEqual(weft("plan", "show", path).stdout, shown)
                run = weft("plan", "diff", name, path)
                self.assertEqual(run.returncode, 0)
                self.assertRegex(run.stdout, r"\Asame: both do [0-9a-f]{16}\n\Z")

    def test_diff_is_done_whether_or_not_there_is_one(self):
        run = weft("plan", "diff", "ddp", "default")
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.assertRegex(run.stdout, r"(?m)^/lanes +1 +8$")


class Streams(unittest.TestCase):
    """What happens when nobody can read the answer."""

    def piped(self, **options):
        reading, writing = os.pipe()
        os.close(reading)
        try:
            return subprocess.run([WEFT, "plan", "schema"], stdout=writing, stderr=subprocess.PIPE,
                                  text=True, timeout=60, **options)
        finally:
            os.close(writing)

    def test_a_reader_that_left_is_no_failure(self):
        run = self.piped(restore_signals=True)
        self.assertEqual((run.returncode, run.stderr), (-signal.SIGPIPE, ""))
        run = self.piped(restore_signals=False)  # Python ignores SIGPIPE, and so its children do
        self.assertEqual((run.returncode, run.stderr), (0, ""))

    def test_a_full_disk_is(self):
        with open("/dev/full", "w") as full:
            run = subprocess.run([WEFT, "plan", "schema"], stdout=full, stderr=subprocess.PIPE,
                                 text=True, timeout=60)
        self.assertEqual(run.returncode, 3)
        self.assertEqual(run.stderr, "weft plan schema: cannot write standard output: "
                         "No space left on device\n")

    def test_a_closed_output_is(self):
        run = subprocess.run(["/bin/sh", "-c", '"$0" plan schema >&-', WEFT], capture_output=True,
                             text=True, timeout=60)
        self.assertEqual(run.returncode, 3)
        self.assertTrue(run.stderr.startswith("weft plan schema: cannot write standard output: "))
        run = subprocess.run(["/bin/sh", "-c", '"$0" plan show nothing >&- 2>&-', WEFT], timeout=60)
        self.assertEqual(run.returncode, 1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
