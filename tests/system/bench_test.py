"""weft bench: every engine that is here gives right results, and the columns agree."""
import json
import os
import subprocess
import tempfile
import unittest

WEFT = os.environ["WEFT"]
COLLECTIVES = ["allreduce", "reduce-scatter", "all-gather", "broadcast", "all-to-all", "sendrecv"]
PEERS = ["gloo", "openmpi", "mpich", "horovod"]


def bus_factor(collective, ranks):
    if collective in ("broadcast", "sendrecv"):
        return 1
    return (2 if collective == "allreduce" else 1) * (ranks - 1) / ranks


class Bench(unittest.TestCase):
    def setUp(self):
        self.folder, self.no_peers = self.temporary_folder(), self.temporary_folder()

    def temporary_folder(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        return temporary.name

    def bench(self, *arguments, **environment):
        # Nothing is installed by a test.
        changed = dict(os.environ, WEFT_SKIP_SETUP="1", TMPDIR=self.folder, **environment)
        return subprocess.run([WEFT, "bench", *arguments], capture_output=True, text=True,
                              timeout=300, env=changed)

    def answer(self, *arguments, **environment):
        run = self.bench(*arguments, "--time", "5ms", "--json", **environment)
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertEqual(os.listdir(self.folder), [])
        return json.loads(run.stdout)

    def expect_rows(self, answer, collective, ranks):
        for row in answer["rows"]:
            self.assertEqual(row["ranks"], ranks)
            self.assertGreater(row["time_us"], 0)
            self.assertLessEqual(row["time_us_low"], row["time_us"])
            self.assertLessEqual(row["time_us"], row["time_us_high"])
            self.assertAlmostEqual(row["algbw"], row["bytes"] / row["time_us"] / 1e3, places=6)
            self.assertAlmostEqual(row["busbw"], row["algbw"] * bus_factor(collective, ranks),
                                   places=6)
            if row["engine"] != "wire":
                self.assertEqual(row["wrong"], 0, row)

    def test_all_collectives_of_all_engines_are_right(self):
        for collective in COLLECTIVES:
            with self.subTest(collective=collective):
                answer = self.answer(collective, "-n", "3", "-b", "12K", "-e", "48K", "--repeats",
                                     "2", "--check", "--peers", ",".join(PEERS))
                self.expect_rows(answer, collective, 3)
                self.assertEqual([engine["engine"] for engine in answer["engines"]],
                                 ["weft", "wire", *PEERS])
                for engine in answer["engines"]:
                    sizes = [row["bytes"] for row in answer["rows"]
                             if row["engine"] == engine["engine"]]
                    if "absent" in engine:
                        self.assertNotIn(engine["engine"], ("weft", "wire"), engine)
                    else:
                        self.assertEqual(sizes, [12288, 49152], engine)

    def test_shared_memory_is_used_by_those_that_have_it(self):
        answer = self.answer("allreduce", "-n", "2", "-b", "64K", "-e", "64K", "--repeats", "2",
                             "--check", "--transport", "shm", "--peers", "gloo,openmpi")
        self.expect_rows(answer, "allreduce", 2)
        over = {row["engine"]: row["transport"] for row in answer["rows"]}
        self.assertEqual(over.pop("gloo", "tcp"), "tcp")
        self.assertEqual(set(over.values()), {"shm"})

    def test_a_peer_that_is_not_there_is_reported_and_the_rest_goes_on(self):
        answer = self.answer("allreduce", "-n", "2", "-b", "4K", "-e", "4K", "--repeats", "1",
                             "--peers", "horovod", WEFT_PEERS=self.no_peers)
        absent = {engine["engine"]: engine.get("absent") for engine in answer["engines"]}
        self.assertIn("horovod is not to be had here: ", absent.pop("horovod"))
        self.assertEqual(set(absent.values()), {None})
        self.assertEqual({row["engine"] for row in answer["rows"]}, {"weft", "wire"})

    def test_for_people_has_the_columns_of_nccl_tests(self):
        run = self.bench("broadcast", "-n", "2", "-b", "1K", "-e", "1K", "--repeats", "1")
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertRegex(run.stdout, r"(?m)^ *size +count +type +redop +engine +over +time\(us\) .*"
                                     r"algbw\(GB/s\) +busbw\(GB/s\) +#wrong$")
        self.assertRegex(run.stdout, r"(?m)^ *1024 +256 +float32 +sum +wire +tcp ")

    def expect_lanes(self, answer):
        self.assertEqual([row["lanes"] for row in answer["rows"]], [1, 2])
        self.assertIn(answer["best"], (1, 2))
        for row in answer["rows"]:
            self.assertAlmostEqual(row["algbw"], answer["bytes"] / row["time_us"] / 1e3, places=6)
        fastest = max(row["algbw"] for row in answer["rows"])
        best = next(row for row in answer["rows"] if row["lanes"] == answer["best"])
        self.assertGreaterEqual(best["algbw"], 0.97 * fastest)
        if answer["losing_from"] is not None:
            self.assertGreater(answer["losing_from"], answer["best"])
            self.assertGreater(answer["loss_percent"], 0)

    def test_lanes_are_tried_alone_and_inside_a_job(self):
        asked = ["lanes", "--max", "2", "--repeats", "1", "--json"]
        run = self.bench(*asked, "-n", "2")
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.expect_lanes(json.loads(run.stdout))
        run = subprocess.run([WEFT, "run", "-n", "2", "--no-prefix", "--", WEFT, "bench", *asked],
                             capture_output=True, text=True, timeout=120)
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        self.expect_lanes(json.loads(run.stdout))

    def test_algorithms_are_timed_and_their_costs_kept(self):
        costs = os.path.join(self.no_peers, "costs.json")
        run = self.bench("algorithms", "-n", "2", "-b", "1K", "-e", "1M", "-f", "32", "--repeats", "1",
                         "-o", costs, "--json")
        self.assertEqual((run.returncode, run.stderr), (0, ""))
        answer = json.loads(run.stdout)
        self.assertEqual([row["bytes"] for row in answer["rows"]], [1024, 32768, 1048576])
        for row in answer["rows"]:
            self.assertEqual(set(row["time_us"]), set(row["reckoned_us"]))
            self.assertIn("ring", row["time_us"])
            best = min(row["time_us"].values())
            self.assertAlmostEqual(row["loss_percent"], 100 * (row["time_us"][row["chosen"]] / best - 1), places=6)
        self.assertGreater(answer["costs"]["bytes_per_s"], 0)
        with open(costs) as file:
            self.assertEqual(json.load(file), answer["costs"])

    def test_sizes_that_make_no_sense_are_refused(self):
        run = self.bench("allreduce", "-b", "2M", "-e", "1M")
        self.assertEqual((run.returncode, run.stdout), (1, ""))
        self.assertIn("sizes from 2MiB to 1MiB", run.stderr)


if __name__ == "__main__":
    unittest.main()
