"""The table of tools/bench about training in PyTorch: weft beside Gloo, by the torch in .venv-torch, and Horovod, by its own."""
import os
import re
import statistics
import subprocess
import sys

ENGINES = {"Gloo": ["--backend", "gloo"], "weft, DDP's buckets": ["--ddp"], "weft, attached": [], "Horovod": None}
TRAINED = ["perceptron", "transformer", "convolutional"]
PLACES = {
    "2 ranks, loopback": ["run", "-n", "2"],
    "4 ranks, loopback": ["run", "-n", "4"],
    "2 hosts, 1 Gb/s": ["lab", "run", "--hosts", "2", "--link", "1gbit"],
    "3 hosts, 1 Gb/s": ["lab", "run", "--hosts", "3", "--link", "1gbit"],
    "2 hosts, 1 Gb/s, 200 Mb/s a flow": ["lab", "run", "--hosts", "2", "--link", "1gbit", "--flow", "200mbit"],
    "3 hosts, 1 Gb/s, 200 Mb/s a flow": ["lab", "run", "--hosts", "3", "--link", "1gbit", "--flow", "200mbit"]}
STEPS = "12"


class Torch:
    def __init__(self, bench, program, root):
        self.bench = bench
        self.weft = program
        self.root = root
        self.python = os.path.join(root, ".venv-torch", "bin", "python3")
        found = subprocess.run([os.path.join(root, "tools", "peers"), "horovod"], stdout=subprocess.PIPE, text=True).stdout
        self.horovod = found.split()[2] if found.startswith("ready horovod ") else None
        package = os.path.join(os.path.dirname(program), "python")
        self.environment = {**os.environ, "PYTHONPATH": package, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    def step_ms(self, place, model, engine):
        """Of the slowest rank: the median of its steps."""
        self.bench.count += 1
        inside = ["-o", os.path.join(self.bench.folder, f"run{self.bench.count}"), "--no-record"] if place[0] == "lab" else []
        horovod = engine is None
        script = [self.python, os.path.join(self.root, "examples", "torch", "train.py"), *(engine or [])]
        if horovod:
            script = [self.horovod, os.path.join(self.root, "tools", "bench_torch_horovod.py")]
        command = [self.weft, *place, *inside, "--", *script, "--model", model, "--steps", STEPS]

        def once():
            done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
            found = [float(ms) for ms in re.findall(r"([\d.]+) ms in the median", done.stdout)]
            if done.returncode != 0 or not found:
                sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
            return max(found)
        ms = self.bench.undisturbed(once)
        print(f"  {model}, {' '.join(place)} {'horovod' if horovod else ' '.join(engine)}: {ms:.1f} ms", file=sys.stderr)
        return ms

    def torch(self):
        if not os.path.exists(self.python):
            sys.exit("tools/bench: no torch here; tools/setup torch installs it")
        lines = ["## Training in PyTorch", "",
                 "`examples/torch/train.py` on processors, one thread a rank, nothing emulated but the network of the lab's hosts; the median of the "
                 f"steps of the slowest rank, of {STEPS}; medians of runs taken in turns, and least and most. Gloo is torch's own, under DDP; Horovod "
                 "is over Gloo, with Debian's torch. What is last is how much faster than Gloo.", "",
                 "| model | where | " + " | ".join(ENGINES) + " | DDP's buckets | attached |", "|" + "---|" * (len(ENGINES) + 4)]
        engines = {name: words for name, words in ENGINES.items() if words is not None or self.horovod}
        for model in TRAINED:
            for where, place in PLACES.items():
                times = {name: [] for name in ENGINES}
                for _ in range(1 if self.bench.quick else 3):
                    for name, engine in engines.items():
                        times[name].append(self.step_ms(place, model, engine))
                middle = {name: statistics.median(found) for name, found in times.items() if found}
                cells = [f"{middle[name]:.0f} ms ({min(found):.0f} to {max(found):.0f})" if found else "not here"
                         for name, found in times.items()]
                ratios = [middle["Gloo"] / middle[name] for name in ("weft, DDP's buckets", "weft, attached")]
                lines.append(f"| {model} | {where} | " + " | ".join([*cells, *(f"{ratio:.2f}" for ratio in ratios)]) + " |")
        return lines
