"""weft.load: tables, findings and predictions of runs that weft itself recorded.

    load_test.py TRACE_SAMPLE TRAINING UNMARKED     programs that write runs

The tables are compared with what the verbs say of the same run, and nothing here needs torch.
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import warnings

# None is a module that cannot be had.
sys.modules["torch"] = None

try:
    import numpy
except ImportError as error:
    print(f"skipped: {error}; tools/setup installs it", file=sys.stderr)
    sys.exit(77)
import weft  # noqa: E402

SAMPLE, TRAINING, UNMARKED = sys.argv[1:4]
del sys.argv[1:4]

COMPUTE = ("forward", "backward", "update")
RANKS = 2
STEPS = 9


def ask(*words):
    """What the program itself says, and without any word beside it."""
    done = subprocess.run([weft.program(), *words, "--json"], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return json.loads(done.stdout)


def record(folder, *command):
    subprocess.run([weft.program(), "run", "-n", str(RANKS), "--timeout", "60s", "--", *command],
                   check=True, capture_output=True, timeout=120,
                   env={**os.environ, "WEFT_TRACE": folder, "WEFT_PLAN": "ddp",
                        "WEFT_SHARED_MEMORY": "0"})


class Runs(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="weft-load-test-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)

    def path(self, *parts):
        return os.path.join(self.folder, *parts)


class Real(Runs):
    """A program with real compute, two ranks on one host."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.recorded = os.path.join(cls.folder, "run")
        record(cls.recorded, TRAINING, "--columns", "60000", "--layers", "4", "--batch", "4",
               "--steps", str(STEPS))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cls.run_ = weft.load(cls.recorded)
        # The same run after its clocks were put on one, as the program writes it.
        cls.aligned = os.path.join(cls.folder, "aligned")
        ask("align", cls.recorded, "-o", cls.aligned)

    def test_has_a_table_of_each_kind(self):
        tables = self.run_.tables
        shown = {}
        for row in ask("show", self.aligned, "--by", "kind")["rows"]:
            kind = row["what"].split()[-1]
            count, total, moved = shown.get(kind, (0, 0, 0))
            shown[kind] = count + row["count"], total + row["total_ns"], moved + row["bytes"]
        self.assertGreater(len(shown), 8)
        for kind, (count, total, moved) in shown.items():
            table = tables[kind]
            self.assertEqual(len(table["rank"]), count, kind)
            self.assertEqual(table["duration_ns"].sum(), total, kind)
            self.assertEqual(table["bytes"].sum(), moved, kind)
        for name, table in tables.items():
            self.assertEqual(len({len(column) for column in table.values()}), 1, name)

    def test_has_every_record_of_every_rank(self):
        tables, info = self.run_.tables, ask("info", self.recorded)
        self.assertEqual(self.run_.info, info)
        kinds = [table for table in tables.values() if "start_ns" in table]
        for process in info["processes"]:
            rank = process["rank"]
            self.assertEqual(sum((table["rank"] == rank).sum() for table in kinds),
                             process["events"])
            for name, said in (("clock_samples", "clock_samples"), ("pings", "pings"),
                               ("probe_results", "probe"), ("notes", "notes")):
                self.assertEqual((tables[name]["rank"] == rank).sum(), process[said], name)
            self.assertEqual((tables["layers"]["rank"] == rank).sum(), info["model"]["layers"])
            gradients = tables["tensors"]["bytes"][tables["tensors"]["rank"] == rank]
            self.assertEqual((len(gradients), gradients.sum()),
                             (info["model"]["tensors"], info["model"]["bytes"]))
        processes = tables["processes"]
        self.assertEqual(list(processes["host"]), [p["host"] for p in info["processes"]])
        self.assertEqual(list(processes["cores"]), [p["cores"] for p in info["processes"]])

    def test_names_what_was_trained(self):
        tables = self.run_.tables
        layers = tables["layers"]["layer"][tables["layers"]["rank"] == 0]
        for kind in COMPUTE:
            of_first = tables[kind]["rank"] == 0
            self.assertEqual(set(tables[kind]["layer"][of_first]), set(layers), kind)
            places = tables[kind]["layer_index"]
            self.assertTrue((layers[places] == tables[kind]["layer"]).all())
        self.assertEqual(set(tables["gradient_ready"]["tensor"]), set(tables["tensors"]["tensor"]))
        # The program evaluates itself once more at the end.
        self.assertEqual(set(tables["forward"]["iteration"]), set(range(STEPS + 1)))
        self.assertEqual(set(tables["chunk"]["shape"]), {"send", "receive"})
        self.assertEqual(set(tables["chunk"]["track_type"]), {"lane_out", "lane_in"})

    def test_rows_stand_in_order_of_time(self):
        for name, table in self.run_.tables.items():
            if "start_ns" in table:
                self.assertTrue((numpy.diff(table["start_ns"]) >= 0).all(), name)

    def test_pairs_messages(self):
        chunk, messages = self.run_.tables["chunk"], self.run_.tables["messages"]
        sends = chunk["shape"] == "send"
        of_chunks = messages["kind"] == "chunk"
        self.assertEqual(of_chunks.sum(), sends.sum())
        self.assertEqual(set(messages["message"][of_chunks]), set(chunk["message"]))
        self.assertEqual(messages["bytes"][of_chunks].sum(), chunk["bytes"][sends].sum())
        self.assertTrue((messages["receive_start_ns"] >= messages["send_start_ns"]).all())
        self.assertTrue((messages["sender"] + messages["receiver"] == 1).all())

    def test_has_the_iterations(self):
        table = self.run_.tables["iteration"]
        shown = ask("show", self.aligned, "--by", "iteration")["rows"]
        self.assertGreaterEqual(len(shown), STEPS)
        for row in shown:
            durations = table["duration_ns"][table["iteration"] == int(row["what"])]
            self.assertEqual((len(durations), durations.sum()), (row["count"], row["total_ns"]))
            if len(durations):
                slowest = table["rank"][table["iteration"] == int(row["what"])][durations.argmax()]
                self.assertEqual(slowest, row["slowest_rank"])

    def test_loads_one_file(self):
        path = os.path.join(self.recorded, "rank-1.weft")
        one = weft.load(pathlib.Path(path))
        self.assertEqual(list(one.tables["processes"]["rank"]), [1])
        self.assertEqual(len(one.tables["messages"]["message"]), 0)
        # Alone it is on its own clock.
        shown = {row["what"]: row for row in ask("show", path, "--by", "kind")["rows"]}
        self.assertEqual(one.tables["wait"]["duration_ns"].sum(), shown["wait"]["total_ns"])
        with self.assertRaisesRegex(weft.Error, "name the folder of the run, not one file"):
            one.findings

    def test_leaves_nothing_behind(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-c", f"import weft; weft.load({self.recorded!r})"],
                env={**os.environ, "TMPDIR": folder}, timeout=60)
            self.assertEqual((done.returncode, os.listdir(folder)), (0, []))


class Explained(Runs):
    """A run of the lab: its probe measures what the lab's links carry, however busy the machine is."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.recorded = os.path.join(cls.folder, "run")
        subprocess.run([weft.program(), "lab", "run", "--model", "alexnet", "--dilation", "60",
                        "--shrink", "60", "--hosts", "2", "--flow", "5gbit", "--iterations", "6",
                        "--plan", "ddp", "-o", cls.recorded],
                       check=True, capture_output=True, timeout=60)
        cls.run_ = weft.load(cls.recorded)

    def test_finds_what_diagnose_finds(self):
        diagnosis = ask("diagnose", self.recorded)
        self.assertEqual(self.run_.diagnosis, diagnosis)
        self.assertEqual(self.run_.findings, diagnosis["findings"])
        self.assertIs(self.run_.diagnosis, self.run_.diagnosis)

    def test_predicts_what_replay_predicts(self):
        run = self.run_
        self.assertEqual(run.predict(), ask("replay", self.recorded))
        other = ask("replay", self.recorded, "--set", "link=1gbit", "--set", "hosts=4",
                    "--plan", "default")
        self.assertEqual(run.predict(set={"link": "1gbit", "hosts": 4}, plan="default"), other)
        self.assertNotEqual(other["predicted"], run.predict()["predicted"])
        plan = pathlib.Path(self.path("lanes.json"))
        plan.write_text(json.dumps({"weft_plan": 1, "name": "mine"}))
        self.assertEqual(run.predict(plan=plan, as_lab=True),
                         ask("replay", self.recorded, "--plan", str(plan), "--as-lab"))

    def test_loads_what_it_predicted(self):
        folder = self.path("predicted")
        self.run_.predict(set={"hosts": 3}, output=folder)
        predicted = weft.load(folder)
        self.assertEqual(predicted.info["made"], "predicted")
        self.assertEqual(set(predicted.tables["forward"]["rank"]), {0, 1, 2})

    def test_says_how_the_program_ended(self):
        with self.assertRaises(weft.Error) as caught:
            self.run_.predict(output=os.path.join(self.recorded, "rank-0.weft", "predicted"))
        self.assertRegex(str(caught.exception), "^weft replay: .*Not a directory")
        self.assertEqual(caught.exception.exit_status, 3)

    def test_is_found_from_elsewhere(self):
        here = os.getcwd()
        self.addCleanup(os.chdir, here)
        os.chdir(self.folder)
        run = weft.load("run")
        os.chdir(here)
        self.assertEqual(run.diagnosis, self.run_.diagnosis)
        self.assertIn("records of 2 ranks", repr(run))

    def test_the_page_s_example_runs(self):
        page = (pathlib.Path(os.environ["WEFT_SOURCE_DIR"]) / "docs" / "python.md").read_text()
        example = page.split("## An example")[1].split("```python\n")[1].split("```")[0]
        os.symlink(self.recorded, self.path("run7"))
        said = subprocess.run([sys.executable, "-c", example], cwd=self.folder, text=True,
                              capture_output=True, timeout=60)
        self.assertEqual((said.returncode, said.stderr), (0, ""))
        self.assertRegex(said.stdout, r"a rank waits \d+\.\d ms a step\n(rank \d sent .*\n){2}"
                         r"a step takes (.*\n)+default on 8 hosts: ")


class Strange(Runs):
    """A run of three hosts whose clocks disagree, in a lab that scaled it, with strange names."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.recorded = os.path.join(cls.folder, "run")
        subprocess.run([SAMPLE, cls.recorded, "20"], check=True, timeout=60)
        cls.run_ = weft.load(cls.recorded)

    def test_is_in_the_target_s_time_and_bytes(self):
        info = self.run_.info
        self.assertEqual((info["dilation"], info["shrink"]), (8, 4))
        for row in ask("show", self.recorded, "--by", "kind")["rows"]:
            *shape, kind = row["what"].split()
            table = self.run_.tables[kind]
            mask = table["shape"] == (shape[0] if shape else "span")
            self.assertEqual(mask.sum(), row["count"], row["what"])
            self.assertEqual(table["bytes"][mask].sum(), row["bytes"])
            if row["what"] != "receive chunk":  # some of them start later on the common clock
                # Both ends of each are rounded, and a clock's drift is within a thousandth.
                self.assertAlmostEqual(table["duration_ns"][mask].sum(), row["total_ns"],
                                       delta=row["count"] + 1e-3 * row["total_ns"])

    def test_is_on_one_clock(self):
        self.assertGreater(ask("align", self.recorded)["backward_before"], 0)
        messages = self.run_.tables["messages"]
        self.assertTrue((messages["receive_start_ns"] >= messages["send_start_ns"]).all())

    def test_counts_messages_as_the_other_export_does(self):
        chrome = ask("export", self.recorded, "--output", self.path("run.json"))
        tables = ask("export", self.recorded, "--to", "npy", "--output", self.path("tables"))
        self.assertEqual(len(self.run_.tables["messages"]["message"]), chrome["arrows"])
        self.assertEqual(tables["halves"], chrome["halves"])
        self.assertGreater(chrome["halves"], 0)
        self.assertEqual(tables["time"], "wall")

    def test_keeps_names_as_they_are(self):
        tables = self.run_.tables
        # What is no UTF-8 becomes U+FFFD.
        self.assertEqual(list(tables["layers"]["layer"][:3]),
                         ["conv1", 'layer "two"\n', "fc\N{REPLACEMENT CHARACTER}"])
        self.assertIn('tab\there \\ "quoted" \x01 \N{REPLACEMENT CHARACTER}( \N{BALL OF YARN}',
                      set(tables["other"]["name"]))
        self.assertEqual(set(tables["tcp_info"]["name"]), {"tcpi_rtt"})
        self.assertEqual(tables["tcp_info"]["value"].min(), 40_000)
        self.assertEqual(tables["messages"]["message"].dtype, numpy.uint64)
        self.assertGreater(tables["messages"]["message"].max(), 1 << 60)

    def test_says_what_is_damaged(self):
        folder = self.path("damaged")
        shutil.copytree(self.recorded, folder)
        path = os.path.join(folder, "rank-1.weft")
        os.truncate(path, os.path.getsize(path) * 3 // 4)
        with self.assertWarnsRegex(UserWarning, "rank-1.weft: damaged; exporting what is left") as w:
            run = weft.load(folder)
        self.assertEqual(w.filename, __file__)
        self.assertTrue(run.info["damage"][0]["unfinished"])
        left = {p["rank"]: p["events"] for p in run.info["processes"]}
        self.assertLess(left[1], {p["rank"]: p["events"] for p in self.run_.info["processes"]}[1])
        self.assertEqual(list(run.tables["processes"]["events"]), [left[0], left[1], left[2]])


class Unmarked(Runs):
    def test_has_iterations_that_were_inferred(self):
        path = self.path("run")
        record(path, UNMARKED, "exchange")
        run = weft.load(path)
        self.assertTrue(any("iterations are inferred" in remark for remark in run.remarks),
                        run.remarks)
        self.assertGreater(len(run.tables["iteration"]["rank"]), 2)
        shown = {row["what"] for row in ask("show", path, "--by", "kind")["rows"]}
        self.assertNotIn("iteration", shown)


class Refused(Runs):
    def refused(self, words, path, status=1):
        with self.assertRaises(weft.Error) as caught:
            weft.load(path)
        self.assertIn(words, str(caught.exception))
        self.assertIn(os.path.abspath(path), str(caught.exception))
        self.assertEqual(caught.exception.exit_status, status)

    def write(self, name, data):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return self.path(name)

    def test_no_such_run(self):
        self.refused("no such file", self.path("nothing"))
        self.refused("no such file", "-nothing")

    def test_an_empty_folder(self):
        os.mkdir(self.path("empty"))
        self.refused("no trace in this folder", self.path("empty"))

    def test_a_file_that_is_no_trace(self):
        self.refused("not a weft trace", self.write("page.weft", b"<html>" * 100))

    def test_a_file_of_which_nothing_is_left(self):
        folder = self.path("whole")
        subprocess.run([SAMPLE, folder, "1"], check=True, timeout=60)
        with open(os.path.join(folder, "rank-0.weft"), "rb") as file:
            start = file.read(100)
        self.refused("nothing is left that says which rank this was", self.write("cut.weft", start))

    def test_another_cluster_that_makes_no_sense(self):
        folder = self.path("unmarked")
        subprocess.run([SAMPLE, folder, "4"], check=True, timeout=60)
        run = weft.load(folder)
        with self.assertRaisesRegex(weft.Error, "^weft replay: ") as caught:
            run.predict(set={"moon": 1})
        self.assertIn("moon", str(caught.exception))
        with self.assertRaisesRegex(weft.Error, "no-such-plan"):
            run.predict(plan="no-such-plan")


class Environment(unittest.TestCase):
    def run_python(self, program):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                              timeout=60)
        return done.returncode, done.stderr.strip().splitlines()[-1]

    def test_without_numpy(self):
        status, said = self.run_python(
            "import sys; sys.modules['numpy'] = None; import weft; weft.program(); weft.load('.')")
        self.assertEqual((status, said),
                         (1, "ImportError: weft.load needs NumPy: pip install numpy"))

    def test_without_the_program(self):
        status, said = self.run_python(
            "import weft._load; weft._load.program = lambda: '/nowhere/weft'; weft.load('.')")
        self.assertEqual(status, 1)
        self.assertIn("the program weft cannot be started", said)
        self.assertIn("install weft again", said)


if __name__ == "__main__":
    unittest.main()
