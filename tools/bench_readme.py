"""The figures and outputs of the README: figures from the tables of docs/measurements.md, outputs from runs.

An output stands in a fenced block after `<!-- output: NAME -->`, the figures between `<!-- numbers -->` and
`<!-- end of numbers -->`. That the figures are those of the tables is also a test (tests/system/docs_test.py).
"""
import json
import os
import re
import shutil
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "system"))
from claims_support import is_sound, number, rows, section, unsound  # noqa: E402

NAMES = {"vgg16": "VGG16", "alexnet": "AlexNet", "resnet50": "ResNet-50", "bert-base": "BERT-base"}
LAB_RUN = "build/weft lab run --model resnet50 --hosts 4 --link 25gbit --flow 5gbit --plan ddp -o run1"
SHOW = "build/weft show run1 --by lane --rank 0"


def numbers():
    """The table of the README's figures, from the page of measurements alone."""
    loop = rows(section("loop"))
    faster = ", ".join(f"{NAMES[row['model']]} {number(row['faster']):.1f}" for row in loop)
    floor = [number(row["after / floor"]) for row in loop]
    errors = re.search(r"Errors: median (.*?) %, worst (.*?) %", section("loop"))
    plans = section("plans")
    random = re.search(r"Replay: median error (.*?) %, worst (.*?) %", plans)
    large = {ranks: rows(section("collectives").split(f"TCP over loopback, {ranks} ranks")[1])[-1] for ranks in (2, 4)}
    against = lambda what: " and ".join(f"{number(large[ranks][f'weft / {what}']):.1f}" for ranks in (2, 4))
    wire = " and ".join(f"{100 * number(large[ranks]['weft / wire']):.0f} %" for ranks in (2, 4))
    capped = max((row for row in rows(section("capped")) if "held" not in row["engine"]),
                 key=lambda row: number(row["against Gloo"]))
    capture = re.search(r"([\d.]+) ns an event", section("capture")).group(1)
    recording = max(abs(number(row["median of the pairs' ratios"])) for row in rows(section("recording")))
    baseline = [number(row["ddp / Gloo"]) for row in rows(section("engines"))]
    return f"""| | |
|---|---|
| **a plan found by search** | {faster} times as fast as DDP's buckets over one flow, where a flow is capped at a fifth of the link; {min(floor):.2f} to {max(floor):.2f} times the floor max(compute, wire) |
| **prediction** | what the new plan takes, from the run before alone: worst {errors.group(2)} % off, median {errors.group(1)} %, on {len(loop)} models; {len(rows(plans))} random plans over algorithms and kinds of workers: median {random.group(1)} %, worst {random.group(2)} % |
| **collectives** | all-reduce of 64 MiB over TCP on one machine, with 2 and 4 ranks: {against('gloo')} times Gloo's speed, {against('openmpi')} times Open MPI's, {wire} of what the bare connections carry; where flows are capped at a quarter of the link, {number(capped['against Gloo']):.1f} times Gloo and {number(capped['against Horovod']):.1f} times Horovod |
| **recording** | {capture} ns an event; iterations with it and without it differ by {recording:.2f} % at the most |

On two shared virtual cores, 4 emulated hosts. weft under plan `ddp` takes {min(baseline):.2f} to {max(baseline):.2f} times what PyTorch's Gloo takes with DDP's buckets, so the baseline is honest.
"""


def with_numbers(page, text):
    return replaced(page, r"(<!-- numbers -->\n).*?(<!-- end of numbers -->)", text)


def with_output(page, name, text):
    return replaced(page, rf"(<!-- output: {re.escape(name)} -->\n```\n).*?(\n```\n)", text)


def replaced(page, pattern, text):
    made, count = re.subn(pattern, lambda found: found.group(1) + text + found.group(2), page, flags=re.S)
    assert count == 1, f"the README has {count} places for {pattern}"
    return made


class Readme:
    def __init__(self, bench, program, root, disturbed):
        self.bench = bench
        self.weft = program
        self.root = root
        self.disturbed = disturbed

    def shell(self, command, **options):
        print(f"  {command}", file=sys.stderr)
        done = subprocess.run(command, shell=True, cwd=self.root, capture_output=True, text=True, **options)
        if done.returncode != 0:
            sys.exit(f"{command}\n{done.stdout[-2000:]}{done.stderr}")
        return done.stdout

    def sound(self, make):
        """`make` gives an answer with what it says of itself, and a text; again until it is sound."""
        for _ in range(5):
            answer, text = make()
            if is_sound(answer):
                return text
        raise self.disturbed(unsound(answer))

    def demo(self):
        said = self.shell("tools/demo 2>&1")
        with open(os.path.join(self.root, "demo", "loop.json")) as file:
            return json.load(file), "$ make demo\n" + said.rstrip()

    def lab_run(self):
        shutil.rmtree(os.path.join(self.root, "run1"), ignore_errors=True)
        said = self.shell(LAB_RUN)
        busy, stolen = re.search(r"processors (?:up to )?(\d+) % busy, (\d+) % stolen", said).groups()
        answer = {"sound": "UNSOUND" not in said, "cpu_busy_percent": float(busy), "steal_percent": float(stolen)}
        return answer, f"$ {LAB_RUN}\n{said.rstrip()}"

    def tests(self):
        said = self.shell("make test 2>&1").splitlines()
        kept = [line for line in said if "tests passed" in line or "Total Test time" in line]
        return "$ make test\n...\n" + "\n".join(kept)

    def remake(self):
        path = os.path.join(self.root, "README.md")
        outputs = {"demo": self.sound(self.demo), "lab run": self.sound(self.lab_run)}
        self.shell("tools/picture demo")
        outputs["show"] = f"$ {SHOW}\n{self.shell(SHOW).rstrip()}"
        shutil.rmtree(os.path.join(self.root, "run1"), ignore_errors=True)
        outputs["test"] = self.tests()
        with open(path) as file:
            page = with_numbers(file.read(), numbers())
        for name, text in outputs.items():
            page = with_output(page, name, text)
        with open(path, "w") as file:
            file.write(page)
        print("wrote README.md and docs/report.png")
