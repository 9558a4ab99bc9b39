#!/usr/bin/env python3
"""The package: what it offers is written down, and what it cannot do is said in one line.

    package_test.py update      writes down what is there now
"""

import importlib
import inspect
import os
import subprocess
import sys
import unittest

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "api.txt")
MODULES = ("weft", "weft.torch")


def offered():
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        for word in sorted(module.__all__):
            thing = getattr(module, word)
            if not inspect.getdoc(thing):
                raise AssertionError(f"{name}.{word} says nothing of itself")
            lines.append(f"{name}.{word}{inspect.signature(thing)}\n")
    return "".join(lines)


def run(program, **environment):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          env={**os.environ, **environment}, timeout=120)
    return done.returncode, done.stdout, done.stderr


class Package(unittest.TestCase):
    def test_offers_what_is_written_down(self):
        with open(GOLDEN) as golden:
            self.assertEqual(offered(), golden.read())

    def test_carries_the_program(self):
        import weft

        said = subprocess.run([weft.program(), "--version"], capture_output=True, text=True)
        self.assertIn(weft.__version__, said.stdout)
        said = subprocess.run([sys.executable, "-m", "weft", "--version"], capture_output=True,
                              text=True)
        self.assertIn(weft.__version__, said.stdout)

    def test_is_imported_without_torch(self):
        # An entry of None is a module that cannot be had.
        status, said, words = run("import sys; sys.modules['torch'] = None; import weft\n"
                                  "print(weft.__version__)\n"
                                  "import weft.torch")
        self.assertEqual(status, 1, words)
        self.assertNotEqual(said, "")
        self.assertIn("weft.torch needs torch: install torch 2.4 or later", words)

    def test_refuses_another_torch_than_it_was_built_for(self):
        status, _, words = run("import torch; torch.__version__ = '2.4.0'; import weft.torch")
        self.assertEqual(status, 1)
        self.assertIn("and this is torch 2.4.0: install weft again", words)

    def test_is_found_by_torch_without_an_import(self):
        status, said, words = run(
            "import sys, torch.distributed as dist\n"
            "dist.init_process_group('weft', store=dist.HashStore(), rank=0, world_size=1)\n"
            "print(dist.get_backend()); dist.destroy_process_group()")
        self.assertEqual((status, said.strip()), (0, "weft"), words)

    def test_has_one_library_of_weft(self):
        status, said, words = run(
            "import weft.torch\n"
            "maps = open('/proc/self/maps').read().split()\n"
            "print(len({word for word in maps if 'libweft' in word}))")
        self.assertEqual((status, said.strip()), (0, "1"), words)


if __name__ == "__main__":
    if sys.argv[1:] == ["update"]:
        with open(GOLDEN, "w") as out:
            out.write(offered())
    else:
        unittest.main()
