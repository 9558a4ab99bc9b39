"""The package as it is without torch: what it offers is written down, and carries the program.

    package_test.py update      writes down what is there now
"""
import inspect
import os
import subprocess
import sys
import unittest
from functools import cached_property

# None is a module that cannot be had.
sys.modules["torch"] = None

import weft  # noqa: E402

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "api.txt")


def described(name, thing):
    """What a name offers, a line each: itself, and the public members of a class."""
    if not inspect.getdoc(thing):
        raise AssertionError(f"{name} says nothing of itself")
    if isinstance(thing, (property, cached_property)):
        getter = thing.fget if isinstance(thing, property) else thing.func
        yield f"{name}: {inspect.signature(getter).return_annotation}\n"
        return
    yield f"{name}{inspect.signature(thing)}\n"
    if not inspect.isclass(thing):
        return
    for word, annotation in sorted(inspect.get_annotations(thing).items()):
        yield f"{name}.{word}: {annotation}\n"
    for word, member in sorted(vars(thing).items()):
        if not word.startswith("_"):
            yield from described(f"{name}.{word}", member)


def offered():
    return "".join(line for word in sorted(weft.__all__)
                   for line in described(f"weft.{word}", getattr(weft, word)))


class Package(unittest.TestCase):
    def test_offers_what_is_written_down(self):
        with open(GOLDEN) as golden:
            self.assertEqual(offered(), golden.read())

    def test_is_typed(self):
        self.assertTrue(os.path.exists(os.path.join(os.path.dirname(weft.__file__), "py.typed")))

    def test_carries_the_program(self):
        for command in [weft.program()], [sys.executable, "-m", "weft"]:
            said = subprocess.run([*command, "--version"], capture_output=True, text=True,
                                  timeout=60)
            self.assertEqual(said.stdout, f"weft {weft.__version__}\n", said.stderr)
        failed = subprocess.run([sys.executable, "-m", "weft", "show"], capture_output=True,
                                timeout=60)
        self.assertEqual(failed.returncode, 2)

    def test_needs_neither_torch_nor_numpy(self):
        subprocess.run([sys.executable, "-c", "import sys\n"
                        "sys.modules['torch'] = sys.modules['numpy'] = None\n"
                        "import weft\n"
                        "assert weft.program() and 'weft.torch' not in sys.modules"],
                       check=True, timeout=60)


if __name__ == "__main__":
    if sys.argv[1:] == ["update"]:
        with open(GOLDEN, "w") as out:
            out.write(offered())
    else:
        unittest.main()
