"""The tables of tools/bench about prediction: everything is predicted from a trace before it is run."""
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tests", "system"))
from models_support import FEW, MANY, write_model  # noqa: E402

PLANS = 24  # random plans of one table
SEED = 20261116  # of the random plans
ALGORITHMS = ["ring", "halving_doubling", "tree", "hierarchical", "doubling", "direct", "auto"]
# Plans that the runs of one are to predict: other lanes, and other threads that serve them.
SHARING = [{"weft_plan": 1, "name": "2 lanes, 2 workers", "lanes": 2, "lane_workers": 2, "chunk": "256KiB",
            "bucket_rule": {"first": "1MiB", "size": "8MiB"}},
           {"weft_plan": 1, "name": "6 lanes", "lanes": 6, "order": "layer", "barrier": "tensor", "chunk": "128KiB",
            "partition": "2MiB", "bucket_rule": {"first": "1MiB", "size": "4MiB"}}]
# Above it the lab's processors, which the target does not share, begin to count.
BUSY_LIMIT = 80


def weft(program, *arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{program} {' '.join(arguments)}\n{done.stderr}")
    return json.loads(done.stdout)


def random_plan(rng, number):
    """Lanes and who serves them, buckets, partition, chunk, credit, order and barrier by chance; sizes are spread evenly over
    their logarithms. Algorithms take turns, so that each is met."""
    def size(low, high):
        return f"{int(1024 * 2 ** rng.uniform(low, high))}KiB"

    plan = {"weft_plan": 1, "name": f"random-{number}", "lanes": rng.randint(1, 8), "order": rng.choice(["ready", "layer"]),
            "barrier": rng.choice(["all", "tensor"]), "chunk": size(-3, 0),
            "bucket_rule": {"first": size(0, 6), "size": size(0, 6), "may_exceed": rng.random() < 0.5}}
    if rng.random() < 0.7:
        plan["partition"] = size(1, 5)
    if rng.random() < 0.7:
        plan["credit"] = size(2, 6)
    plan["algorithm"] = [{"use": ALGORITHMS[number % len(ALGORITHMS)]}]
    workers = rng.choice([(None, 1), (None, 1), ("thread", 2), ("process", 1), ("process", 2)])
    plan["lane_workers"] = min(workers[1], plan["lanes"])
    if workers[0] == "process":
        plan["lane_worker"] = "process"
    return plan


def served_by(plan):
    """Who serves the lanes, in short."""
    count, kind = plan["lane_workers"], plan.get("lane_worker", "thread")
    return "driver" if kind == "thread" and count == 1 else f"{count} {kind}"


def kendall(pairs, repeatable):
    """Kendall's tau of (predicted, measured), without pairs whose measured times differ by less than that share."""
    agree = disagree = tied = 0
    for (p1, m1), (p2, m2) in itertools.combinations(pairs, 2):
        if abs(m1 - m2) <= repeatable * min(m1, m2):
            tied += 1
        elif (p1 - p2) * (m1 - m2) > 0:
            agree += 1
        else:
            disagree += 1
    return (agree - disagree) / max(1, agree + disagree), tied


def percent(predicted, measured):
    return 100 * (predicted / measured - 1)


def naive_ms(run, flows, plan):
    """max(compute, bytes / rate), with the rate that the lanes' flows may have."""
    rate = min(run["link_bits_per_s"], plan.get("lanes", 1) * flows)
    return max(run["compute_ms"], run["wire_ms"] * run["link_bits_per_s"] / rate)


class Prediction:
    """Tables of predictions; `bench` makes runs, `cluster` names the one that is recorded."""

    def __init__(self, bench, program, models, cluster):
        self.bench = bench
        self.program = program
        self.models = models
        self.cluster = cluster

    def recorded(self, model, *options, cluster=None):
        """A run that keeps its trace: its folder and its result."""
        def once():
            out = os.path.join(self.bench.folder, f"recorded-{self.bench.count}")
            self.bench.count += 1
            return out, weft(self.program, "lab", "run", "--model", model, *(cluster or self.cluster), *options, "-o", out, "--json")
        return self.bench.least_disturbed(once, lambda made: made[1]["steal_percent"])

    def predicted(self, trace, *options):
        return weft(self.program, "replay", trace, "--as-lab", *options, "--json")["predicted"]

    def loop(self):
        lines = ["## The loop", "",
                 "`weft lab loop` from `ddp`: run, predict, apply, run again; three times each. The floor is max(compute, "
                 "2(p-1)/p x bytes / link); the error is that of the optimized plan, predicted from the run before alone.", "",
                 "| model | before | predicted | interval | after | error | in it | self-replay | faster | after / floor "
                 "| first finding |", "|---|---|---|---|---|---|---|---|---|---|---|"]
        errors, inside, total = [], 0, 0
        for model in self.models:
            for _ in range(1 if self.bench.quick else 3):
                run = self.loop_once(model, self.cluster, "ddp")
                before, after, predicted = run["before"], run["after"], run["predicted"]
                within = predicted["low"] <= after["iteration_ms"] <= predicted["high"]
                errors.append(abs(run["prediction_error_percent"]))
                inside += within
                total += 1
                first = run["findings"][0]["name"] if run["findings"] else "none"
                lines.append(
                    f"| {model} | {before['iteration_ms']:.1f} ms | {predicted['iteration_ms']:.1f} ms "
                    f"| {predicted['low']:.1f} to {predicted['high']:.1f} | {after['iteration_ms']:.1f} ms "
                    f"| {run['prediction_error_percent']:+.1f} % | {'yes' if within else 'no'} "
                    f"| {run['self_replay_error_percent']:+.2f} % | {run['speedup']:.2f} x "
                    f"| {after['iteration_ms'] / run['floor_ms']:.2f} | {first} |")
        lines += ["", f"Errors: median {statistics.median(errors):.1f} %, worst {max(errors):.1f} %; "
                  f"{inside} of {total} measured times lie in the interval."]
        return lines

    def loop_once(self, model, cluster, before):
        def once():
            out = os.path.join(self.bench.folder, f"loop-{self.bench.count}")
            self.bench.count += 1
            run = weft(self.program, "lab", "loop", "--model", model, *cluster, "--before", before, "-o", out, "--json")
            shutil.rmtree(out, ignore_errors=True)
            print(f"  {model} {' '.join(cluster)}: {run['before']['iteration_ms']:.1f} -> {run['after']['iteration_ms']:.1f} ms, predicted "
                  f"{run['predicted']['iteration_ms']:.1f} ({run['prediction_error_percent']:+.1f} %), "
                  f"{run['steal_percent']:.0f} % stolen", file=sys.stderr)
            return run
        return self.bench.least_disturbed(once, lambda run: run["steal_percent"])

    def undilated(self):
        """Where every real job lives: neither time nor sizes are scaled."""
        lines = ["## Nothing dilated", "",
                 "`weft lab loop --dilation 1 --shrink 1` from `default`: links, chunks and host costs in their real proportion. "
                 f"`{MANY['name']}` has {MANY['layers']} layers, {MANY['parameters'] / 1e6:.0f} M parameters and {MANY['compute_ms']} ms of "
                 f"compute, `{FEW['name']}` {FEW['layers']}, {FEW['parameters'] / 1e6:.0f} M and {FEW['compute_ms']} ms. A cap is a fifth of "
                 f"the link. Runs with processors over {BUSY_LIMIT} % busy are shown and not counted.", "",
                 "| model | hosts | link | cap | before | predicted | after | error | in it | self-replay | one_flow_limit | busy |",
                 "|---|---|---|---|---|---|---|---|---|---|---|---|"]
        rates, hosts = ([500], [2]) if self.bench.quick else ([100, 500, 1000, 2000], [2, 3, 4])
        errors, replays, inside, false_findings = [], [], 0, 0
        for model, rate, count, capped in itertools.product((MANY, FEW), rates, hosts, (False, True)):
            path = write_model(os.path.join(self.bench.folder, model["name"] + ".json"), **model)
            cluster = ["--hosts", str(count), "--link", f"{rate}mbit", "--dilation", "1", "--shrink", "1",
                       "--iterations", "5" if rate == 100 else "8"]
            run = self.loop_once(path, [*cluster, "--flow", f"{rate / 5:g}mbit"] if capped else cluster, "default")
            before, after, predicted = run["before"], run["after"], run["predicted"]
            within = predicted["low"] <= after["iteration_ms"] <= predicted["high"]
            claimed = any(finding["name"] == "one_flow_limit" for finding in run["findings"])
            counts = run["cpu_busy_percent"] <= BUSY_LIMIT
            if counts:
                errors.append(abs(run["prediction_error_percent"]))
                replays.append(abs(run["self_replay_error_percent"]))
                inside += within
                false_findings += claimed and not capped
            lines.append(
                f"| {model['name']} | {count} | {rate} Mb/s | {f'{rate / 5:g} Mb/s' if capped else '-'} | {before['iteration_ms']:.1f} ms "
                f"| {predicted['iteration_ms']:.1f} ms | {after['iteration_ms']:.1f} ms | {run['prediction_error_percent']:+.1f} % "
                f"| {'yes' if within else 'no'} | {run['self_replay_error_percent']:+.1f} % | {'found' if claimed else '-'} "
                f"| {run['cpu_busy_percent']:.0f} %{'' if counts else ', not counted'} |")
        lines += ["", f"Errors of {len(errors)} predictions: median {statistics.median(errors):.1f} %, worst {max(errors):.1f} %; "
                  f"{inside} measured times lie in the interval. Self-replay: worst {max(replays):.1f} %. `one_flow_limit` where "
                  f"there is no cap: {false_findings}."]
        return lines

    def sharing(self):
        """Training that burns a core and lanes that need one, on the cores of this machine."""
        lines = ["## Training and lanes on the same cores", "",
                 "`weft lab run --burn --dilation 1 --shrink 1`: compute takes processor time, so training and communication take it from each "
                 f"other. From one run of `{MANY['name']}` under the plan on the left on links of 1 Gb/s, what is on its right is predicted before it is "
                 "run (`weft replay --as-lab`).", "",
                 "| hosts | from | to | predicted | measured | error | busy |", "|---|---|---|---|---|---|---|"]
        model = write_model(os.path.join(self.bench.folder, MANY["name"] + ".json"), **MANY)
        others = []
        for number, plan in enumerate(SHARING):
            others.append(os.path.join(self.bench.folder, f"sharing-{number}.json"))
            with open(others[-1], "w") as file:
                json.dump(plan, file)
        errors = []
        for hosts in [2] if self.bench.quick else [2, 3]:
            common = ["--hosts", str(hosts), "--dilation", "1", "--shrink", "1", "--burn", "--iterations", "8"]
            cluster, slow = [*common, "--link", "1gbit"], [*common, "--link", "250mbit"]
            targets = [("`ddp`", cluster, "ddp", []), ("`default`", cluster, "default", []),
                       *((plan["name"], cluster, path, []) for plan, path in zip(SHARING, others)),
                       ("`default`, links of 250 Mb/s", slow, "default", ["--set", "link=250mbit"])]
            guesses = []
            for before in ("ddp", "default"):
                trace, _ = self.recorded(model, "--plan", before, cluster=cluster)
                guesses += [(before, target, self.predicted(trace, "--plan", target[2], *target[3])["iteration_ms"])
                            for target in targets]
            measured = {name: self.bench.run("--model", model, *options, "--plan", plan) for name, options, plan, _ in targets}
            for before, (name, *_), predicted in guesses:
                run = measured[name]
                errors.append(abs(percent(predicted, run["iteration_ms"])))
                lines.append(f"| {hosts} | `{before}` | {name} | {predicted:.1f} ms | {run['iteration_ms']:.1f} ms "
                             f"| {percent(predicted, run['iteration_ms']):+.1f} % | {run['cpu_busy_percent']:.0f} % |")
        lines += ["", f"Errors: median {statistics.median(errors):.1f} %, worst {max(errors):.1f} %."]
        return lines

    def plans(self):
        lines = ["## Random plans", "",
                 f"From one trace of VGG16 under `ddp`, {PLANS} random plans (seed {SEED}) are predicted before any of them is "
                 "run. Naive is max(compute, bytes / rate of the lanes).", "",
                 "| plan | algorithm | lanes | chunk | served by | order | barrier | predicted | measured | error | naive | naive's error "
                 "| busy |", "|---|---|---|---|---|---|---|---|---|---|---|---|---|"]
        rng = random.Random(SEED)
        trace, _ = self.recorded("vgg16", "--plan", "ddp", "--iterations", "8")
        guesses = []
        for number in range(4 if self.bench.quick else PLANS):
            plan = random_plan(rng, number)
            path = os.path.join(self.bench.folder, f"plan-{number}.json")
            with open(path, "w") as file:
                json.dump(plan, file)
            guesses.append((plan, path, self.predicted(trace, "--plan", path)["iteration_ms"]))
        pairs, naive_pairs = [], []
        for plan, path, predicted in guesses:
            run = self.bench.run("--model", "vgg16", *self.cluster, "--plan", path, "--iterations", "8")
            measured, naive = run["iteration_ms"], naive_ms(run, run["flow_bits_per_s"], plan)
            pairs.append((predicted, measured))
            naive_pairs.append((naive, measured))
            lines.append(f"| {plan['name']} | {plan['algorithm'][0]['use']} | {plan['lanes']} | {plan['chunk']} | {served_by(plan)} | {plan['order']} "
                         f"| {plan['barrier']} | {predicted:.1f} ms "
                         f"| {measured:.1f} ms | {percent(predicted, measured):+.1f} % | {naive:.1f} ms "
                         f"| {percent(naive, measured):+.1f} % | {run['cpu_busy_percent']:.0f} % |")
        lines.append("")
        for name, found in (("Replay", pairs), ("Naive", naive_pairs)):
            errors = [abs(percent(p, m)) for p, m in found]
            (tau, _), (clear, tied) = kendall(found, 0), kendall(found, 0.01)
            lines.append(f"{name}: median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %, Kendall's tau "
                         f"{tau:.2f}; {clear:.2f} without the {tied} pairs that were measured within 1 % of each other, about what "
                         "repeats of one run differ by.")
        return lines

    def clusters(self):
        lines = ["## Other clusters", "",
                 "From one trace of 4 hosts at 25 Gb/s under `ddp`, fitted on none of the others. In the first column what is "
                 "changed (`weft replay --as-lab --set`).", "",
                 "| changed | model | plan | predicted | measured | error | busy |", "|---|---|---|---|---|---|---|"]
        changes = [("hosts=2", ["--hosts", "2", "--link", "25gbit"]), ("hosts=3", ["--hosts", "3", "--link", "25gbit"]),
                   ("hosts=6", ["--hosts", "6", "--link", "25gbit"]), ("link=12.5gbit", ["--hosts", "4", "--link", "12.5gbit"]),
                   ("link=50gbit", ["--hosts", "4", "--link", "50gbit"])]
        errors = []
        for model in ("vgg16", "resnet50"):
            trace, _ = self.recorded(model, "--plan", "ddp", "--iterations", "8")
            for change, cluster in changes[:1] if self.bench.quick else changes:
                for plan in ("ddp", "default"):
                    predicted = self.predicted(trace, "--plan", plan, "--set", change)["iteration_ms"]
                    run = self.bench.run("--model", model, *cluster, "--flow", "5gbit", "--plan", plan, "--iterations", "8")
                    errors.append(abs(percent(predicted, run["iteration_ms"])))
                    lines.append(f"| {change} | {model} | {plan} | {predicted:.1f} ms | {run['iteration_ms']:.1f} ms "
                                 f"| {percent(predicted, run['iteration_ms']):+.1f} % | {run['cpu_busy_percent']:.0f} % |")
        lines += ["", f"Errors: median {statistics.median(errors):.1f} %, worst {max(errors):.1f} %."]
        return lines

    def straggler(self):
        lines = ["## A straggler, and clocks that disagree", "",
                 "`--slow 2:0.5`: what `weft diagnose` says that healing rank 2 would gain, and what was gained.", "",
                 "| model | plan | first finding | rank | gain predicted | interval | gain measured |",
                 "|---|---|---|---|---|---|---|"]
        for model, plan in (("vgg16", "default"), ("resnet50", "default"), ("resnet50", "ddp"), ("bert-base", "default")):
            trace, slow = self.recorded(model, "--plan", plan, "--iterations", "8", "--slow", "2:0.5")
            findings = weft(self.program, "diagnose", trace, "--json")["findings"]
            run = self.bench.run("--model", model, *self.cluster, "--plan", plan, "--iterations", "8")
            gained = 100 * (1 - run["iteration_ms"] / slow["iteration_ms"])
            found = next((f for f in findings if f["name"] == "straggler"), None)
            first = findings[0]["name"] if findings else "none"
            lines.append(f"| {model} | {plan} | {first} | {found['rank'] if found else '-'} "
                         + (f"| {found['gain_percent']:.1f} % | {found['low']:.1f} to {found['high']:.1f} "
                            if found else "| - | - ") + f"| {gained:.1f} % |")
        trace, _ = self.recorded("alexnet", "--plan", "ddp", "--iterations", "6", "--clock", "1:+250ms:+50ppm")
        host = weft(self.program, "align", trace, "--json")["hosts"][1]
        lines += ["", f"`--clock 1:+250ms:+50ppm`: offset {host['offset_ns'] / 1e6:.4f} ms, from {host['low_ns'] / 1e6:.4f} to "
                  f"{host['high_ns'] / 1e6:.4f} ms ({(host['high_ns'] - host['low_ns']) / 1e3:.0f} us wide); drift "
                  f"{host['drift_ppm']:.1f} ppm."]
        return lines

    def replay(self):
        speed = weft(self.program, "bench", "replay", "--json")
        return ["## Replay", "", f"`weft bench replay`: {speed['operations_per_second'] / 1e6:.1f} million operations a second "
                f"on one core for {speed['operations'] / 1e6:.2f} million; {speed['replay_share_percent']:.0f} % of a search "
                "is replay."]
