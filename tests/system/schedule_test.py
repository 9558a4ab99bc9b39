"""What is predicted is what the runtime does, step by step.

For plans whose order does not depend on timing, the operations of a predicted run come in the order in which the
runtime really did them; and where one operation runs at a time on one lane, so do its messages.
"""
import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

from lab_support import WEFT, lab

HOSTS = 3
ITERATIONS = 6


def run(*arguments):
    done = subprocess.run([WEFT, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Schedule(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="weft-schedule-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def records(self, run_folder):
        """Operations and sends of a run: (rank, facts), in order of time."""
        chrome = self.path("chrome.json")
        run("export", run_folder, "--to", "chrome", "-o", chrome)
        with open(chrome) as file:
            events = json.load(file)["traceEvents"]
        operations, sends = [], []
        ranks = {event["pid"]: int(event["args"]["name"].split()[1]) for event in events
                 if event["name"] == "process_name"}
        for event in events:
            facts = event.get("args", {})
            if event["ph"] != "X" or not {"operation", "iteration"} <= set(facts):
                continue
            rank = ranks[event["pid"]]
            if event["cat"] == "operation":
                operations.append((rank, event["ts"], facts))
            elif event["cat"] == "chunk" and facts["peer"] == (rank + 1) % HOSTS:
                sends.append((rank, event["ts"], facts))
        self.assertTrue(operations and sends)
        return operations, sends

    def both(self, plan):
        """The same plan, measured and predicted from that measurement."""
        measured, predicted = self.path("measured"), self.path("predicted")
        done = lab(measured, "--hosts", str(HOSTS), "--iterations", str(ITERATIONS), "--plan", plan)
        self.assertEqual(done.returncode, 0, done.stderr)
        run("replay", measured, "-o", predicted)
        return self.records(measured), self.records(predicted)

    def common_order(self, operations):
        """By rank and iteration: (bucket, partition) in the order that all ranks agreed on."""
        order = collections.defaultdict(list)
        for rank, _, facts in sorted(operations, key=lambda row: (row[0], row[2]["operation"])):
            order[rank, facts["iteration"]].append((facts["bucket"], facts.get("partition", 0)))
        return dict(order)

    def compare_orders(self, measured, predicted):
        was, said = self.common_order(measured[0]), self.common_order(predicted[0])
        iterations = sorted({iteration for _, iteration in was} & {i for _, i in said})
        self.assertGreaterEqual(len(iterations), ITERATIONS - 1)
        for iteration in iterations:
            for rank in sorted({rank for rank, _ in was}):
                self.assertGreater(len(was[rank, iteration]), 1)
                self.assertEqual(was[rank, iteration], said[rank, iteration], (rank, iteration))

    def messages(self, sends):
        """By rank and operation: (step, chunk) of what was sent, in order of time."""
        order = collections.defaultdict(list)
        for rank, _, facts in sorted(sends, key=lambda row: (row[0], row[1],
                                                             int(row[2]["message"], 16))):
            order[rank, facts["operation"]].append((facts["step"], facts["chunk"]))
        return dict(order)

    def test_of_ddp(self):
        self.compare_orders(*self.both("ddp"))

    def test_of_one_piece_at_a_time_on_one_lane(self):
        plan = self.path("plan.json")
        with open(plan, "w") as file:
            json.dump({"weft_plan": 1, "name": "one at a time", "order": "ready", "lanes": 1,
                       "bucket_rule": {"first": "8MiB", "size": "24MiB"}, "partition": "8MiB",
                       "credit": "8MiB", "chunk": "1MiB", "barrier": "all"}, file)
        measured, predicted = self.both(plan)
        self.compare_orders(measured, predicted)
        was, said = self.messages(measured[1]), self.messages(predicted[1])
        common = sorted(set(was) & set(said))
        operations = len({facts["operation"] for _, _, facts in measured[0]})
        self.assertGreaterEqual(len(common), HOSTS * operations * (ITERATIONS - 1) // ITERATIONS)
        for key in common:
            self.assertEqual(was[key], said[key], key)
            self.assertEqual({step for step, _ in was[key]}, set(range(2 * (HOSTS - 1))), key)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
