"""weft probe: alone, inside a job, and what it leaves."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

WEFT = os.environ["WEFT"]
UNITS = ("link_bytes_per_s", "pair_link_bytes_per_s", "flow_bytes_per_s", "round_trip_idle_ns",
         "round_trip_loaded_ns", "cpu_ns_per_byte", "cpu_ns_per_chunk", "copy_ns_per_byte",
         "reduce_ns_per_byte", "checksum_ns_per_byte")


class Probe(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.folder = os.path.join(self.temporary.name, "run")

    def weft(self, *arguments):
        environment = dict(os.environ, TMPDIR=self.temporary.name)
        return subprocess.run([WEFT, *arguments], capture_output=True, text=True, timeout=60,
                              env=environment)

    def expect_answer(self, answer, ranks):
        self.assertEqual(answer["ranks"], ranks)
        seen = {(row["scope"], row["direction"], row["flows"]) for row in answer["rates"]}
        self.assertIn(("ring", "forward", 1), seen)
        self.assertIn(("pair", "reverse", 1), seen)
        self.assertGreater(len(seen), 12)
        for row in answer["rates"]:
            self.assertGreater(row["median_bps"], 0)
            self.assertLessEqual(row["slowest_bps"], row["fastest_bps"])
        self.assertEqual(sorted(answer["costs"]), sorted((*UNITS, "link_is_lower_bound")))
        for name in ("link_bytes_per_s", "round_trip_idle_ns", "copy_ns_per_byte"):
            self.assertGreater(answer["costs"][name]["value"], 0)

    def test_alone_starts_its_own_ranks_and_leaves_nothing(self):
        run = self.weft("probe", "-n", "3", "--json")
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        answer = json.loads(run.stdout)
        self.expect_answer(answer, 3)
        self.assertIsNone(answer["run"])
        self.assertEqual(os.listdir(self.temporary.name), [])

    def test_for_people_says_what_is_unknown(self):
        run = self.weft("probe")
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.assertRegex(run.stdout, r"(?m)^all at once +along the ring +1 +\d ")
        self.assertRegex(run.stdout, r"(?m)^round trip, idle +[\d.]+ [um]s ")
        self.assertRegex(run.stdout, r"(?m)^one connection +(unknown|[\d.]+ .b/s)")

    def test_inside_a_job_is_one_rank(self):
        run = self.weft("run", "-n", "3", "--no-prefix", "--", WEFT, "probe", "--json")
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.expect_answer(json.loads(run.stdout), 3)
        run = self.weft("run", "-n", "2", "--", WEFT, "probe", "-n", "2")
        self.assertEqual(run.returncode, 3)
        self.assertIn("leave -n out", run.stderr)

    def test_keeps_traces_when_asked(self):
        run = self.weft("probe", "-o", self.folder, "--json")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(json.loads(run.stdout)["run"], self.folder)
        self.assertEqual(sorted(os.listdir(self.folder)), ["rank-0.weft", "rank-1.weft"])
        info = json.loads(self.weft("info", "--json", self.folder).stdout)
        self.assertEqual(info["damage"], [])
        self.assertTrue(info["probe"])
        run = self.weft("probe", "-o", self.folder)
        self.assertEqual((run.returncode, run.stdout), (1, ""))
        self.assertEqual(len(run.stderr.splitlines()), 1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
