"""Groups of real processes that are struck at any moment: who is named, how soon, what is left.

    chaos_test.py CHAOS_SAMPLE [--runs N] [--first SEED] [--at-once N] [--only KIND/MOMENT]
                  [--markdown FILE] [--json FILE]
    chaos_test.py CHAOS_SAMPLE --seed N [--loud]      one run alone

A seed decides everything: 3 to 6 ranks, transport, who serves the lanes, forked children, what the
ranks are doing, and what strikes whom and when (chaos_support.py). Checked in every run: every
survivor names a victim, the same one, with rank 0's words where there is a rank 0 to ask; in time;
nobody hangs, crashes or gets a wrong sum; no process, file or name in /dev/shm is left; those that
are left form one group of more than half, or each has a reason.

In time is (docs/runtime.md, Failure): 1 s after a death. For a stopped rank and for one that is
cut off, where all connections stay open and nothing can tell death from delay, the deadline for
silence and 1 s. While joining, a rank that has come is missed within 1 s, and one that has not at
the deadline for joining, which rank 0 gives 2 s more to say who is missing. A machine that does not
let processes run delays the ranks as well: how late a thread wakes that sleeps for 20 ms is added
up between the blow and the last word, and added to the limit; runs that needed it are counted.
"""
import argparse
import concurrent.futures
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from chaos_support import (GRACE, JOIN, KINDS, SECOND, Run, Scene, end_with_the_driver)

PEACE, REBUILT, REFUSED, UNJOINED = 0, 3, 4, 5
LONGEST = 120  # seconds of a run


class Judge:
    """What a run should have been."""

    def __init__(self, run):
        self.run, self.scene = run, run.scene
        self.members = run.members
        self.named = []        # seconds, of each survivor
        self.allowance = 0.0   # seconds by which the machine was late, if they were needed

    def fault(self, words):
        self.run.faults.append(words)

    def judge(self):
        for member in self.members:
            for words in member.all("wrong"):
                self.fault(f"rank {member.rank}: {' '.join(words)}")
            self.judge_end(member)
        if self.scene.harmless:
            for member in self.members:
                if member.process.returncode != PEACE:
                    self.fault(f"rank {member.rank} did not end in peace: {self.last(member)}")
        elif self.scene.kind == "partition":
            self.judge_partition()
        elif self.run.struck:
            self.judge_names()
            self.judge_groups([[member for member in self.members if not self.is_dead(member)]])

    @staticmethod
    def last(member):
        return member.lines[-1] if member.lines else "it said nothing"

    def is_dead(self, member):
        """Killed on purpose."""
        if self.scene.moment == "rebuild" and member.rank == self.scene.victims[0]:
            return True
        return member.rank in self.run.struck and self.scene.kind in ("kill", "term", "two")

    def judge_end(self, member):
        code = member.process.returncode
        # One that is killed while it leaves may have left before.
        allowed = (-9, -15, PEACE, REBUILT) if self.is_dead(member) else (
            PEACE, REBUILT, REFUSED, UNJOINED)
        if code not in allowed:
            self.fault(f"rank {member.rank} ended with {code}: {self.last(member)}")
        if code == REFUSED and not member.said("refused"):
            self.fault(f"rank {member.rank} has no new group and no reason")
        if code == UNJOINED and self.scene.moment != "join":
            self.fault(f"rank {member.rank} did not join: {self.last(member)}")

    # ---- names

    def in_time(self, member, seconds, limit, since):
        """Notes how long it took, and whether that is too long even for this machine."""
        self.named.append(seconds)
        if seconds <= limit:
            return
        late = self.run.metronome.between(since, since + int(seconds * 1e9))
        if seconds <= limit + late:
            self.allowance = max(self.allowance, seconds - limit)
        else:
            self.fault(f"rank {member.rank} took {seconds:.2f} s, {limit:g} s are allowed and the "
                       f"machine was late by {late:.2f} s")

    def judge_names(self):
        scene, struck = self.scene, self.run.struck
        first = scene.victims[:1] if scene.moment == "rebuild" else sorted(struck)
        blow = max(struck[rank] for rank in first)
        victim = self.members[first[0]]
        if scene.kind == "memory" and victim.said("failed"):
            # A rank lacks memory when it wants some.
            blow = max(blow, int(victim.all("failed")[0][1]))
        survivors = [member for member in self.members if member.rank not in struck]
        failed = [member for member in survivors if member.said("failed")]
        may_be_well = scene.moment == "leave" or (scene.kind == "memory" and scene.limit_only)
        for member in survivors:
            if member.said("unjoined"):
                self.judge_unjoined(member, first, blow)
            elif not member.said("failed") and not may_be_well:
                self.fault(f"rank {member.rank} named nobody: {self.last(member)}")
        if may_be_well and failed and len(failed) < len(survivors) and 0 not in first:
            self.fault("some survivors left in peace and others did not")
        limit = scene.silence + SECOND if scene.kind == "stop" and scene.moment != "rebuild" \
            else SECOND
        for member in failed:
            _, at, _, culprit, words = member.all("failed")[0]
            if int(culprit) not in first:
                self.fault(f"rank {member.rank} blames {culprit}: {words}")
            self.in_time(member, (int(at) - blow) / 1e9, limit, blow)
            if 0 in (one.rank for one in failed):
                expected = self.members[0].all("failed")[0][4]
                if words != expected:
                    self.fault(f"rank {member.rank} says \"{words}\", rank 0 \"{expected}\"")
        self.judge_second(survivors)
        if scene.kind in ("stop", "memory"):
            victim = self.members[scene.victims[1 if scene.moment == "rebuild" else 0]]
            ends_well = may_be_well and victim.said("left")
            if not (ends_well or victim.said("failed") or victim.said("unjoined")):
                self.fault(f"the victim has no reason: {self.last(victim)}")

    def judge_unjoined(self, member, victims, blow):
        at, words = int(member.all("unjoined")[0][1]), " ".join(member.all("unjoined")[0][2:])
        if not any(f"rank {victim} " in words for victim in victims):
            self.fault(f"rank {member.rank} does not name {victims}: {words}")
        has_come = "left while" in words or "is lost" in words
        limit = SECOND if has_come and self.scene.kind != "stop" else JOIN + GRACE + SECOND
        self.in_time(member, (at - blow) / 1e9, limit, blow)

    def judge_second(self, survivors):
        """Of the blow that falls while the others meet again, if the new group had formed."""
        if self.run.struck_second is None:
            return
        limit = self.scene.silence + SECOND if self.scene.kind == "stop" else SECOND
        for member in survivors:
            for _, at, _, culprit, words in member.all("failed")[1:]:
                if int(culprit) != self.scene.victims[1]:
                    self.fault(f"rank {member.rank} blames {culprit} then: {words}")
                since = self.run.struck_second
                self.in_time(member, (int(at) - since) / 1e9, limit, since)

    def judge_partition(self):
        scene = self.scene
        sides = [[member for member in self.members
                  if (scene.hosts[member.rank] == scene.cut_host) == cut] for cut in (False, True)]
        for side in sides:
            ranks = {member.rank for member in side}
            for member in side:
                if not member.said("failed"):
                    self.fault(f"rank {member.rank} named nobody: {self.last(member)}")
                    continue
                _, at, _, culprit, words = member.all("failed")[0]
                if int(culprit) in ranks or int(culprit) < 0:
                    self.fault(f"rank {member.rank} blames {culprit}, which it can reach: {words}")
                self.in_time(member, (int(at) - self.run.cut_at) / 1e9, scene.silence + SECOND,
                             self.run.cut_at)
            told = {member.all("failed")[0][4] for member in side if member.said("failed")}
            if 0 in ranks and len(told) > 1:
                self.fault(f"there is more than one reason: {told}")
        self.judge_groups([self.members] if scene.heals is not None else sides)

    # ---- new groups

    def judge_groups(self, sides):
        """At most one, of the same members on all of them, and of everyone who could be in it."""
        scene = self.scene
        need = scene.ranks // 2 + 1
        # Two that are lost one after the other: the second may be of the group that the first left.
        least = need if scene.moment != "rebuild" else (scene.ranks - 1) // 2 + 1
        inside = [member for member in self.members if member.process.returncode == REBUILT]
        groups = {member.all("rebuilt")[-1][2] for member in inside}
        if len(groups) > 1:
            self.fault(f"there are several groups: {groups}")
        for group in groups:
            ranks = set(map(int, group.split(",")))
            if len(ranks) < least:
                self.fault(f"a group of {group} of {scene.ranks}")
            # One that dies while the new group ends in peace is missed by nobody.
            dead = {member.rank for member in self.members if self.is_dead(member)}
            ended = {member.rank for member in inside}
            if not ranks <= ended | dead or not ended <= ranks:
                self.fault(f"the group is {group}, and {sorted(ended)} ended in one")
        stopped = set(self.run.struck) if scene.kind in ("stop", "memory") else set()
        for side in sides:
            # Whoever the others did not wait for, or who was stopped, may come too late.
            callers = [member for member in side
                       if member.said("rebuilding") and member.rank not in stopped]
            late = scene.kind == "partition" and scene.heals is not None
            if len(callers) < need or late:
                continue
            # A leader that dies while it tells them to go leaves two parts, of different epochs, and
            # perhaps neither is enough.
            parted = scene.moment == "rebuild" and scene.kind != "stop" and \
                scene.victims[1] < min(member.rank for member in callers)
            for member in callers:
                if member.process.returncode == REBUILT:
                    continue
                if parted and member.said("refused") and "no new group" in self.last(member):
                    self.run.notes.append("a leader died while it told the others to go")
                    break
                self.fault(f"rank {member.rank} is not in the new group: {self.last(member)}")

    def result(self):
        scene, run = self.scene, self.run
        codes = [member.process.returncode for member in self.members]
        outcome = "rebuilt" if REBUILT in codes else "refused" if REFUSED in codes else "none"
        return {"seed": scene.seed, "kind": scene.kind, "moment": scene.moment,
                "transport": scene.transport, "scene": str(scene), "outcome": outcome,
                "silence": scene.silence, "named": max(self.named) if self.named else None,
                "allowance": self.allowance, "faults": run.faults, "notes": run.notes}


def one_run(sample, seed, folder, loud):
    """Inside: this process is the first of its namespaces."""
    end_with_the_driver()
    run = Run(Scene(seed), sample, folder)
    run.prepare()
    run.play()
    judge = Judge(run)
    judge.judge()
    result = judge.result()
    if run.faults or loud:
        words = []
        for member in run.members:
            words.append(f"rank {member.rank} ended with {member.process.returncode}:")
            words += [f"  {line}" for line in member.lines]
            with open(member.log, errors="replace") as log:
                words += [f"    {line.rstrip()}" for line in log.readlines()[-40:]]
        words.append(f"struck: {run.struck}, went on: {run.went_on}")
        result["lines"] = words
    print(json.dumps(result), flush=True)
    os._exit(0)


# ---- many runs -------------------------------------------------------------------------------

def namespaces():
    """The words that give a run namespaces of its own; None where that is forbidden."""
    for user in (["--user", "--map-root-user"], []):
        words = ["unshare", *user, "--net", "--mount", "--pid", "--fork", "--kill-child",
                 "--mount-proc"]
        script = "mount -t tmpfs t /dev/shm && ip link add between type bridge && ip link set lo up"
        try:
            if subprocess.run([*words, "sh", "-c", script], capture_output=True).returncode == 0:
                return words
        except OSError:
            return None
    return None


def carry_out(words, sample, seed, base, loud=False):
    """One run in a process of its own; what became of it."""
    folder = tempfile.mkdtemp(dir=base)
    began = time.monotonic()
    held, holds = os.pipe()  # while it is open, the run goes on
    run = subprocess.Popen(
        [*words, sys.executable, os.path.abspath(__file__), sample, "--seed", str(seed), "--inside",
         folder, *(["--loud"] if loud else [])],
        stdin=held, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.close(held)
    try:
        out, err = run.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        out, err = "", f"it took longer than {LONGEST} s"
    finally:
        os.close(holds)
        run.kill()
        run.wait()
        os.rmdir(folder)  # what was in it was mounted there
    try:
        result = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        scene = Scene(seed)
        result = {"seed": seed, "kind": scene.kind, "moment": scene.moment, "scene": str(scene),
                  "transport": scene.transport, "outcome": "none", "named": None, "notes": [],
                  "allowance": 0.0, "faults": [f"the run broke: {out[-500:]} {err[-2000:]}"]}
    result["took"] = time.monotonic() - began
    return result


def stolen():
    """Processor seconds that others took from this machine."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def tell(result):
    print(f"{result['scene']}: {result['took']:.1f} s", flush=True)
    for words in result["faults"]:
        print(f"  FAULT: {words}")
    for words in result.get("lines", []):
        print(f"    {words}")
    if result["faults"]:
        print(f"  alone: chaos_test.py CHAOS_SAMPLE --seed {result['seed']} --loud", flush=True)


def table(results):
    """Markdown: a line for each kind of blow and transport."""
    rows = ["| what strikes | transport | runs | to name the victim: median, worst | rebuilt | "
            "refused | faults |", "|---|---|---|---|---|---|---|"]
    for kind in KINDS:
        for transport in ("tcp", "shm"):
            some = [one for one in results if (one["kind"], one["transport"]) == (kind, transport)]
            if not some:
                continue
            named = {}
            for one in some:
                # What ends at a deadline is counted apart from what is seen at once.
                if one["named"] is not None:
                    limit = "joining" if one["moment"] == "join" else "" if kind not in (
                        "stop", "partition") else "rebuilding" if one["moment"] == "rebuild" else (
                            f"silence {one['silence']:g} s")
                    named.setdefault(limit, []).append(one["named"])
            times = "; ".join(
                f"{statistics.median(values):.2f} s, {max(values):.2f} s"
                f"{' (' + limit + ')' if limit else ''}" for limit, values in sorted(named.items()))
            rows.append(
                f"| {kind} | {transport} | {len(some)} | {times or 'harmless'} | "
                f"{sum(one['outcome'] == 'rebuilt' for one in some)} | "
                f"{sum(one['outcome'] == 'refused' for one in some)} | "
                f"{sum(bool(one['faults']) for one in some)} |")
    return "\n".join(rows) + "\n"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("sample")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=3)  # they wait, most of the time
    parser.add_argument("--only", help="stop/rebuild, kill/, /join: seeds that draw this")
    parser.add_argument("--markdown")
    parser.add_argument("--json")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--inside")
    parser.add_argument("--loud", action="store_true")
    arguments = parser.parse_args()
    sample = os.path.abspath(arguments.sample)
    if arguments.inside:
        one_run(sample, arguments.seed, arguments.inside, arguments.loud)
    words = namespaces()
    if words is None:
        print("skipped: namespaces are forbidden here")
        return 77
    base = tempfile.mkdtemp(prefix="weft-chaos-")

    def interrupted(*_):
        # What still runs ends with this process.
        shutil.rmtree(base, ignore_errors=True)
        os._exit(130)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    try:
        return strike(words, sample, base, arguments)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def strike(words, sample, base, arguments):
    if arguments.seed is not None:
        result = carry_out(words, sample, arguments.seed, base, arguments.loud)
        tell(result)
        return 1 if result["faults"] else 0
    began, stolen_before, results = time.monotonic(), stolen(), []
    pool = concurrent.futures.ThreadPoolExecutor(arguments.at_once)
    kind, _, moment = (arguments.only or "/").partition("/")
    seeds = list(itertools.islice(
        (seed for seed in itertools.count(arguments.first)
         if kind in ("", Scene(seed).kind) and moment in ("", Scene(seed).moment)),
        arguments.runs))
    pending = [pool.submit(carry_out, words, sample, seed, base) for seed in seeds]
    for done in concurrent.futures.as_completed(pending):
        results.append(done.result())
        tell(results[-1])
    faulty = sorted(one["seed"] for one in results if one["faults"])
    helped = [one for one in results if one["allowance"] > 0]
    took = time.monotonic() - began
    print(f"\n{len(results)} runs in {took:.0f} s, {arguments.at_once} at once; "
          f"{stolen() - stolen_before:.1f} s of processor time went to other machines")
    print(f"{len(helped)} needed more than the limit because the machine was late"
          + "".join(f"; seed {one['seed']}: {one['allowance']:.2f} s" for one in helped))
    notes = [note for one in results for note in one["notes"]]
    for note in sorted(set(notes)):
        print(f"{notes.count(note)} times: {note}")
    lines = table(results)
    print(lines)
    if arguments.markdown:
        with open(arguments.markdown, "w") as file:
            file.write(lines)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    if faulty:
        print(f"FAILED: seeds {' '.join(map(str, faulty))}")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
