"""The tables of tools/bench about the runtime: collectives beside peers and the wire, lanes, and training over them."""
import json
import os
import statistics
import subprocess
import sys

PEERS = "gloo,openmpi,horovod"
ENGINES = ["weft", "weft-sealed", "gloo", "openmpi", "mpich", "horovod", "wire"]


def median(values):
    return statistics.median(values) if values else None


class Runtime:
    def __init__(self, bench, program):
        self.bench = bench
        self.weft = program

    def measure(self, *arguments):
        command = [self.weft, "bench", *arguments, "--json"]

        def once():
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                sys.exit(f"{' '.join(command)}\n{done.stderr}")
            return json.loads(done.stdout)
        return self.bench.least_disturbed(once, lambda made: made["steal_percent"])

    # ---- collectives

    def table(self, title, *arguments):
        """One row a size: algbw of every engine, and weft against each."""
        found = self.measure(*arguments, "--repeats", "1" if self.bench.quick else "5")
        rows = {}
        for row in found["rows"]:
            rows.setdefault(row["bytes"], {})[row["engine"]] = row
        present = [engine for engine in ENGINES if any(engine in row for row in rows.values())]
        lines = [f"### {title}", "", f"`weft bench {' '.join(arguments)}`, {found['steal_percent']:.0f} % stolen.", "",
                 "| bytes | " + " | ".join(f"{e}" for e in present) + " | "
                 + " | ".join(f"weft / {e}" for e in present if e != "weft") + " |",
                 "|" + "---|" * (2 * len(present))]
        for size in sorted(rows):
            row = rows[size]
            cells = [f"{row[e]['time_us']:.1f} us, {row[e]['algbw']:.2f} GB/s" if e in row else "-" for e in present]
            ratios = [f"{row['weft']['algbw'] / row[e]['algbw']:.2f}" if e in row else "-" for e in present if e != "weft"]
            lines.append(f"| {size} | " + " | ".join(cells + ratios) + " |")
        return lines + [""]

    def collectives(self):
        lines = ["## Collectives on one machine", "",
                 "Medians of repeats taken in turns, all engines in one run; algbw is bytes / time. `wire` moves the "
                 "bytes of the ring over one connection each way and does nothing else. Columns `weft / x` above 1: "
                 "weft is faster.", ""]
        for ranks in ("2", "4"):
            lines += self.table(f"All-reduce, TCP over loopback, {ranks} ranks", "allreduce", "-n", ranks, "-b", "1K", "-e",
                                "64M", "-f", "4", "--transport", "tcp", "--peers", PEERS)
        for ranks in ("2", "4"):
            lines += self.table(f"All-reduce, shared memory, {ranks} ranks", "allreduce", "-n", ranks, "-b", "64K", "-e",
                                "64M", "-f", "32", "--transport", "shm", "--peers", PEERS)
        for name in ("reduce-scatter", "all-gather", "broadcast", "all-to-all", "sendrecv"):
            lines += self.table(f"{name}, TCP over loopback", name, "-n", "2" if name == "sendrecv" else "4", "-b", "64K",
                                "-e", "16M", "-f", "16", "--transport", "tcp", "--peers", "gloo,openmpi")
        return lines

    def sealed(self):
        lines = ["## What sealing costs", "",
                 "All-reduce over TCP on one machine with plain connections, and with sealed ones (`WEFT_SEAL=1`); in one run, taken in turns.", ""]
        for ranks in ("2", "4"):
            lines += self.table(f"{ranks} ranks", "allreduce", "-n", ranks, "-b", "64K", "-e", "64M", "-f", "4", "--transport", "tcp",
                                "--sealed")
        return lines

    # ---- in the lab

    def big_tensor(self, megabytes):
        """A model that is one all-reduce: its compute takes a thousandth of the transfer."""
        path = os.path.join(self.bench.folder, f"one-{megabytes}.json")
        layer = {"name": "all", "forward_us": 10, "backward_us": 10,
                 "tensors": [{"name": "weight", "shape": [megabytes * 250_000]}]}
        with open(path, "w") as file:
            json.dump({"weft_model": 1, "name": f"one-{megabytes}", "source": "one tensor, to time its all-reduce",
                       "device": "none", "batch": 1, "update_gb_per_s": 1e6, "layers": [layer]}, file)
        return path

    def plan(self, **words):
        path = os.path.join(self.bench.folder, f"{words['name']}.json")
        with open(path, "w") as file:
            json.dump({"weft_plan": 1, "chunk": "512KiB", **words}, file)
        return path

    def capped(self):
        megabytes, hosts, link = 256, 4, 25e9
        model = self.big_tensor(megabytes)
        common = ["--model", model, "--hosts", str(hosts), "--link", "25gbit", "--flow", "6250mbit", "--iterations", "8"]
        lanes = {n: self.plan(name=f"lanes{n}", lanes=n) for n in (1, 4, 8)}
        results = self.bench.interleaved({
            "gloo": [*common, "--plan", "ddp", "--engine", "gloo"],
            "horovod": [*common, "--plan", "ddp", "--engine", "horovod"],
            "weft, 1 lane": [*common, "--plan", lanes[1]],
            "weft, 4 lanes": [*common, "--plan", lanes[4]],
            "weft, 8 lanes": [*common, "--plan", lanes[8]],
            "weft, 4 lanes, one held to a tenth": [*common, "--plan", lanes[4], "--lane-rate", "1:625mbit"],
            "weft, 8 lanes, one held to a tenth": [*common, "--plan", lanes[8], "--lane-rate", "1:625mbit"]}, 3)
        times = {name: median([r["iteration_ms"] for r in found]) for name, found in results.items()}
        bytes_moved = 2 * (hosts - 1) / hosts * megabytes * 1e6
        lines = ["## One all-reduce where flows are capped at a quarter of the link", "",
                 f"4 hosts, 25 Gb/s links, 6.25 Gb/s a flow, {megabytes} MB; time of the target, and the share of the link "
                 "that the bytes of the ring took.", "", "| engine | time | share of the link | against Gloo | against Horovod |",
                 "|---|---|---|---|---|"]
        for name, ms in times.items():
            if ms is None:
                lines.append(f"| {name} | not here | | | |")
                continue
            against = [f"{times[peer] / ms:.2f}" if times.get(peer) else "-" for peer in ("gloo", "horovod")]
            lines.append(f"| {name} | {ms:.1f} ms | {100 * bytes_moved * 8 / (ms * 1e-3) / link:.0f} % | {against[0]} "
                         f"| {against[1]} |")
        return lines

    def training(self):
        lines = ["## Training over lanes, threads and auxiliary processes", "",
                 "4 hosts, 25 Gb/s links, iteration time of the target, medians of repeats taken in turns. Horovod with its "
                 "own defaults, Gloo with DDP's buckets. `default` is the plan of that name with its lanes served by the "
                 "driving thread, by 2 threads, or by 1 and 2 auxiliary processes; `1 lane` is the same plan with one. "
                 "Gain: speed over Horovod; published for Fast Horovod: AlexNet +64.5 %, VGG16 +72.6 %.", ""]
        base = json.loads(subprocess.run([self.weft, "plan", "show", "default"], capture_output=True, text=True,
                                         check=True).stdout)

        def variant(name, **words):
            return self.plan(**{**base, "name": name, **words})

        plans = {"1 lane": variant("one", lanes=1), "default": "default",
                 "2 threads": variant("threads", lane_workers=2),
                 "1 process": variant("process", lane_worker="process"),
                 "2 processes": variant("processes", lane_worker="process", lane_workers=2)}
        for cap in (["--flow", "6250mbit"], []):
            lines += [f"### {'Flows capped at a quarter of the link' if cap else 'No cap'}", "",
                      "| model | floor | Horovod | Gloo | " + " | ".join(plans) + " | optimized | gain of the best | of the "
                      "optimized |", "|" + "---|" * (len(plans) + 7)]
            for model in ("alexnet", "vgg16"):
                common = ["--model", model, "--hosts", "4", "--link", "25gbit", *cap, "--iterations", "8"]
                optimized = self.optimized(common)
                variants = {"horovod": [*common, "--plan", "ddp", "--engine", "horovod"],
                            "gloo": [*common, "--plan", "ddp", "--engine", "gloo"],
                            **{name: [*common, "--plan", plan] for name, plan in plans.items()},
                            "optimized": [*common, "--plan", optimized]}
                results = self.bench.interleaved(variants, 3)
                times = {name: median([r["iteration_ms"] for r in found]) for name, found in results.items()}
                floor = results["default"][0]["floor_ms"]
                show = [f"{times[name]:.1f} ms" if times[name] else "not here" for name in variants]
                gain = ["-", "-"]
                if times["horovod"]:
                    best = min(times[name] for name in plans)
                    gain = [f"{100 * (times['horovod'] / ms - 1):+.0f} %" for ms in (best, times["optimized"])]
                lines.append(f"| {model} | {floor:.1f} ms | " + " | ".join(show + gain) + " |")
            lines.append("")
        return lines

    def optimized(self, common):
        """The plan that the loop finds from a recorded run under `ddp`."""
        self.bench.count += 1
        out = os.path.join(self.bench.folder, f"loop{self.bench.count}")
        done = subprocess.run([self.weft, "lab", "run", *common, "--plan", "ddp", "-o", out, "--json"], capture_output=True,
                              text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        plan = out + ".json"
        done = subprocess.run([self.weft, "optimize", out, "--as-lab", "-o", plan], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return plan

    def burning(self):
        lines = ["## Lane workers beside training that burns its core", "",
                 "`weft lab run --burn`: compute takes processor time, as training on a processor does. 2 hosts, one rank "
                 "each, on this machine's cores; real milliseconds of processor time an iteration, mean over ranks. Step: "
                 "the target's time.", "",
                 "| lanes served by | step | training | communication in the process | auxiliary processes |",
                 "|---|---|---|---|---|"]
        common = ["--model", "alexnet", "--hosts", "2", "--link", "25gbit", "--flow", "6250mbit", "--iterations", "8",
                  "--burn"]
        base = json.loads(subprocess.run([self.weft, "plan", "show", "default"], capture_output=True, text=True,
                                         check=True).stdout)
        variants = {"the driving thread": [*common, "--plan", "default"],
                    "2 threads": [*common, "--plan", self.plan(**{**base, "name": "burn2", "lane_workers": 2})],
                    "1 auxiliary process": [*common, "--plan", self.plan(**{**base, "name": "burnp", "lane_worker": "process"})],
                    "2 auxiliary processes": [*common, "--plan", self.plan(
                        **{**base, "name": "burnpp", "lane_worker": "process", "lane_workers": 2})]}
        results = self.bench.interleaved(variants, 3)
        for name, found in results.items():
            cell = {key: median([r[key] for r in found]) for key in
                    ("iteration_ms", "training_cpu_ms", "communication_cpu_ms", "auxiliary_cpu_ms")}
            lines.append(f"| {name} | {cell['iteration_ms']:.1f} ms | {cell['training_cpu_ms']:.1f} ms "
                         f"| {cell['communication_cpu_ms']:.1f} ms | {cell['auxiliary_cpu_ms']:.1f} ms |")
        return lines
