"""docs/plan.schema.json and `weft plan check` are two descriptions of one format: do they agree?

The schema may accept more (it cannot compare fields, or sizes written as text), and each such case
is named below. It may never refuse what the program accepts.
"""
import copy
import json
import os
import random
import subprocess
import sys
import tempfile
import unittest

try:
    import jsonschema
except ImportError:
    print("the Python package jsonschema is missing (tools/setup installs it)")
    sys.exit(77)

WEFT = os.environ["WEFT"]
ROOT = os.environ["WEFT_SOURCE_DIR"]

FULL = {
    "weft_plan": 1, "name": "vgg-lanes", "comment": "",
    "bucket_rule": {"first": "1MiB", "size": 26214400, "may_exceed": True},
    "buckets": [{"tensors": ["fc8.weight", "fc8.bias"], "priority": 3, "codec": "none"},
                {"tensors": ["vgg/conv1:0"]}],
    "partition": "4MiB", "order": "ready", "priority": {"conv1.weight": 0}, "credit": "16MiB",
    "barrier": "all", "algorithm": [{"up_to": "64KiB", "use": "tree"}, {"use": "ring"}],
    "lanes": 8, "chunk": "256KiB", "lane_worker": "thread", "lane_workers": 1, "codec": "none",
    "sync": {"mode": "bounded_stale", "staleness": 2},
}

VALID = [
    {"weft_plan": 1},
    {"weft_plan": 1.0, "lanes": 4.0},
    {"weft_plan": 1, "partition": None, "credit": None, "buckets": [], "priority": {}},
    {"weft_plan": 1, "credit": "1.5MiB", "chunk": "64MiB", "partition": 4096},
    {"weft_plan": 1, "sync": {}},
    {"weft_plan": 1, "sync": {"mode": "local_sgd", "staleness": 4}},
    {"weft_plan": 1, "sync": {"mode": "bounded_stale"}},
    {"weft_plan": 1, "sync": {"mode": "one_step_delay", "staleness": 0}},
    FULL,
]

# Refused by both.
BAD = [
    {}, [], None, 1, "ddp",
    {"weft_plan": 2}, {"weft_plan": "1"}, {"weft_plan": None}, {"weft_plan": True},
    {"weft_plan": 1, "barier": "all"},
    {"weft_plan": 1, "lanes": "four"}, {"weft_plan": 1, "lanes": 0}, {"weft_plan": 1, "lanes": 65},
    {"weft_plan": 1, "lanes": 1.5}, {"weft_plan": 1, "lanes": None}, {"weft_plan": 1, "lanes": True},
    {"weft_plan": 1, "chunk": 4095}, {"weft_plan": 1, "chunk": None},
    {"weft_plan": 1, "chunk": "4 KiB"}, {"weft_plan": 1, "chunk": "-4KiB"},
    {"weft_plan": 1, "chunk": ".5MiB"}, {"weft_plan": 1, "chunk": "1e6"},
    {"weft_plan": 1, "partition": 4095}, {"weft_plan": 1, "partition": "big"},
    {"weft_plan": 1, "credit": 0}, {"weft_plan": 1, "credit": 2 ** 40 + 1},
    {"weft_plan": 1, "order": "first"}, {"weft_plan": 1, "barrier": "none"},
    {"weft_plan": 1, "codec": "zip"}, {"weft_plan": 1, "lane_worker": "fiber"},
    {"weft_plan": 1, "algorithm": []}, {"weft_plan": 1, "algorithm": [{}]},
    {"weft_plan": 1, "algorithm": [{"use": "star"}]}, {"weft_plan": 1, "algorithm": "ring"},
    {"weft_plan": 1, "bucket_rule": {"size": 0}}, {"weft_plan": 1, "bucket_rule": {"last": 1}},
    {"weft_plan": 1, "buckets": [{}]}, {"weft_plan": 1, "buckets": [{"tensors": []}]},
    {"weft_plan": 1, "buckets": [{"tensors": ["a", "a"]}]},
    {"weft_plan": 1, "buckets": [{"tensors": [""]}]},
    {"weft_plan": 1, "buckets": [{"tensors": ["a"], "priority": None}]},
    {"weft_plan": 1, "priority": {"a": "first"}}, {"weft_plan": 1, "priority": {"": 1}},
    {"weft_plan": 1, "priority": {"a": 10 ** 9 + 1}}, {"weft_plan": 1, "priority": {"x" * 1025: 1}},
    {"weft_plan": 1, "name": ""}, {"weft_plan": 1, "name": "a\tb"}, {"weft_plan": 1, "name": 7},
    {"weft_plan": 1, "sync": {"mode": "synchronous", "staleness": 1}},
    {"weft_plan": 1, "sync": {"staleness": 1}}, {"weft_plan": 1, "sync": {"mode": "local_sgd"}},
    {"weft_plan": 1, "sync": {"mode": "bounded_stale", "staleness": 10 ** 6 + 1}},
]

# What only the program can see.
BEYOND_THE_SCHEMA = [
    {"weft_plan": 1, "chunk": "1KiB"},
    {"weft_plan": 1, "credit": "0MiB"},
    {"weft_plan": 1, "lane_workers": 2},
    {"weft_plan": 1, "name": "é" * 200},
    {"weft_plan": 1, "algorithm": [{"use": "ring"}, {"use": "ring"}]},
    {"weft_plan": 1, "algorithm": [{"use": "ring", "up_to": 1}]},
    {"weft_plan": 1, "algorithm": [{"up_to": 9, "use": "ring"}, {"up_to": 9, "use": "tree"},
                                   {"use": "ring"}]},
    {"weft_plan": 1, "buckets": [{"tensors": ["a"]}, {"tensors": ["a"]}]},
]

ODD_VALUES = [None, True, 0, -1, 1, 65, 1.5, 4096.0, 10 ** 30, "", "none", "ring", "ready", "4KiB",
              "4 KiB", "1GiB", [], {}, ["a"], {"a": 1}, [{"use": "ring"}], [{"tensors": ["t"]}]]


def mutated(rng):
    """FULL with a few values replaced, removed or renamed, at any depth."""
    document = copy.deepcopy(FULL)
    for _ in range(rng.randint(1, 2)):
        node = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = rng.choice(keys)
            if isinstance(node[key], (dict, list)) and rng.random() < 0.7:
                node = node[key]
                continue
            what = rng.random()
            if what < 0.6:
                node[key] = copy.deepcopy(rng.choice(ODD_VALUES))
            elif what < 0.8:
                del node[key]
            elif isinstance(node, dict):
                node[str(key)[:-1]] = node.pop(key)
            break
    return document


class Schema(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(os.path.join(ROOT, "docs", "plan.schema.json")) as file:
            cls.schema = json.load(file)
        cls.validator = jsonschema.Draft202012Validator(cls.schema)

    def checked(self, documents):
        """What the program says of each document: None, or its complaint."""
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for i, document in enumerate(documents):
                paths.append(os.path.join(folder, f"{i}.json"))
                with open(paths[-1], "w") as file:
                    json.dump(document, file)
            run = subprocess.run([WEFT, "plan", "check", "--json", *paths], capture_output=True,
                                 text=True, timeout=120)
            answer = json.loads(run.stdout)
        self.assertEqual(run.returncode, 0 if answer["ok"] else 1)
        return [plan.get("error") for plan in answer["plans"]]

    def test_is_a_schema_and_the_one_that_the_program_prints(self):
        jsonschema.Draft202012Validator.check_schema(self.schema)
        printed = subprocess.run([WEFT, "plan", "schema"], capture_output=True, text=True).stdout
        with open(os.path.join(ROOT, "docs", "plan.schema.json")) as file:
            self.assertEqual(printed, file.read())

    def test_presets_are_valid(self):
        for name in ("ddp", "default", "horovod"):
            shown = subprocess.run([WEFT, "plan", "show", name], capture_output=True, text=True)
            self.validator.validate(json.loads(shown.stdout))

    def test_examples_of_the_document_are_valid(self):
        with open(os.path.join(ROOT, "docs", "plan_format.md")) as file:
            blocks = file.read().split("```json\n")[1:]
        examples = [json.loads(block.split("```")[0]) for block in blocks]
        self.assertTrue(examples)
        for example in examples:
            self.validator.validate(example)
        self.assertEqual(self.checked(examples), [None] * len(examples))

    def test_both_accept(self):
        for document, complaint in zip(VALID, self.checked(VALID)):
            with self.subTest(document=document):
                self.assertIsNone(complaint)
                self.assertTrue(self.validator.is_valid(document))

    def test_both_refuse(self):
        for document, complaint in zip(BAD, self.checked(BAD)):
            with self.subTest(document=document):
                self.assertIsNotNone(complaint)
                self.assertFalse(self.validator.is_valid(document))

    def test_only_the_program_refuses(self):
        for document, complaint in zip(BEYOND_THE_SCHEMA, self.checked(BEYOND_THE_SCHEMA)):
            with self.subTest(document=document):
                self.assertIsNotNone(complaint)
                self.assertTrue(self.validator.is_valid(document))

    def test_agree_on_random_documents(self):
        rng = random.Random(1)
        documents = [mutated(rng) for _ in range(1000)]
        accepted = 0
        for document, complaint in zip(documents, self.checked(documents)):
            with self.subTest(document=document):
                valid = self.validator.is_valid(document)
                accepted += complaint is None
                if complaint is None:
                    self.assertTrue(valid)
                elif valid:
                    # Only for a reason that the schema cannot state.
                    self.assertRegex(complaint, r"a size from|number of lanes|up_to|already in")
        self.assertGreater(accepted, 50)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
