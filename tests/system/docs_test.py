"""Documents say what is: facts on pages that the sources or other pages can answer for."""
import os
import re
import sys
import unittest

ROOT = os.environ["WEFT_SOURCE_DIR"]
sys.path.insert(0, os.path.join(ROOT, "tools"))
import bench_readme  # noqa: E402
LISTS = "USES|PARTS|SOURCES|TESTS|FUZZ|BENCH|DATA|LIBS"


def read(*path):
    with open(os.path.join(ROOT, *path)) as file:
        return file.read()


def modules():
    """What the build says: each module with what it uses, in order."""
    order = re.search(r"foreach\(module IN ITEMS(.*?)\)", read("src", "CMakeLists.txt"), re.S)
    found = []
    for module in order.group(1).split():
        text = re.sub(r"#.*", "", read("src", module, "CMakeLists.txt"))
        call = re.search(rf"weft_module\(\s*{module}\b(.*?)\)", text, re.S).group(1)
        uses = re.search(rf"\bUSES\b(.*?)(?=\b(?:{LISTS})\b|$)", call, re.S)
        found.append((module, uses.group(1).split() if uses else []))
    return found


class Architecture(unittest.TestCase):
    def test_lists_the_modules_of_the_build(self):
        rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| [^|]+ \|$", read("ARCHITECTURE.md"), re.M)
        said = [(name, [] if uses == "–" else uses.split(", ")) for name, uses in rows]
        self.assertEqual([name for name, _ in said], [name for name, _ in modules()])
        for (name, uses), (_, used) in zip(said, modules()):
            self.assertEqual(set(uses), set(used), f"{name}: ARCHITECTURE.md and src/{name}/CMakeLists.txt")


class Readme(unittest.TestCase):
    def test_has_the_figures_of_the_measurements(self):
        page = read("README.md")
        self.assertEqual(bench_readme.with_numbers(page, bench_readme.numbers()), page)

    def test_marks_every_output_that_is_remade(self):
        page = read("README.md")
        for name in "demo", "lab run", "show", "test":
            changed = bench_readme.with_output(page, name, "something else")
            self.assertIn("something else", changed)
        self.assertEqual(len(re.findall(r"^\$ ", page, re.M)), 4)


class Links(unittest.TestCase):
    def test_lead_to_what_there_is(self):
        pages = [name for name in os.listdir(ROOT) if name.endswith(".md")]
        pages += [os.path.join("docs", name) for name in os.listdir(os.path.join(ROOT, "docs"))
                  if name.endswith(".md")]
        self.assertGreater(len(pages), 10)
        for page in pages:
            text = re.sub(r"```.*?```", "", read(page), flags=re.S)
            for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
                if "://" in target:
                    continue
                path = os.path.join(ROOT, os.path.dirname(page), target)
                self.assertTrue(os.path.exists(path), f"{page} leads to {target}")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v"] if len(sys.argv) == 1 else sys.argv)
