"""One run of chaos_test.py: a group of real processes, what strikes it, and what is left of it.

A run is process 1 of namespaces of its own: it has its own network, /dev/shm and folder, and
whatever it leaves behind can be seen, and ends with it.
"""
import ctypes
import os
import random
import resource
import secrets
import signal
import subprocess
import threading
import time

JOIN = 6.0     # Options::join_deadline, also of a rebuild
SETTLE = 1.5   # of a rebuild
GRACE = 2.0    # that ranks wait longer for rank 0's word on who did not come
SECOND = 1.0   # in which a death is told to all, by docs/runtime.md
BEAT = 0.02

# What happens, and how often of a hundred. `stop` is longer than the deadline for silence; `pause`,
# `pause_all`, `blip` (a short cut) and `worker` must harm nobody.
KINDS = {"kill": 20, "term": 8, "two": 9, "stop": 14, "pause": 9, "pause_all": 7, "partition": 12,
         "blip": 5, "memory": 8, "worker": 8}
HARMLESS = ("pause", "pause_all", "blip", "worker")
MOMENTS = {"kill": {"work": 45, "join": 18, "leave": 17, "rebuild": 20},
           "term": {"work": 45, "join": 18, "leave": 17, "rebuild": 20},
           "stop": {"work": 60, "join": 14, "leave": 13, "rebuild": 13}}


def now():
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class Scene:
    """Everything that a seed decides."""

    def __init__(self, seed):
        draw = random.Random(seed)
        self.seed = seed
        self.kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
        moments = MOMENTS.get(self.kind, {"work": 1})
        self.moment = draw.choices(list(moments), list(moments.values()))[0]
        self.ranks = draw.randint(3, 6)
        self.victims = draw.sample(range(self.ranks), 2)
        self.transport = draw.choice(("tcp", "shm"))
        self.worker = draw.choice(("driver", "thread", "process"))
        if self.kind == "worker":
            self.worker = "process"
        self.workers = {"driver": 1, "thread": 2}.get(self.worker, draw.randint(1, 2))
        self.lanes = max(self.workers, draw.randint(1, 3))
        self.sealed = draw.random() < 0.3
        self.mode = draw.choice(("d", "x", "p", "dx", "dp", "dxp"))
        self.progress = draw.random() < 0.8
        self.fork = draw.random() < 0.4
        self.by_file = draw.random() < 0.3
        self.whole = draw.random() < 0.5       # lane workers are stopped with their ranks
        # Ranks come to the meeting one after the other, so that there is a while to be struck in.
        self.waits = [draw.random() * 0.1 if self.moment == "join" else 0.0
                      for _ in range(self.ranks)]
        self.delay = draw.random() * (0.16 if self.moment == "join" else 0.6)
        self.delay_again = draw.random() * draw.choice((0.02, 0.3))
        self.duration = draw.uniform(1, 3)
        self.goes_on = draw.choice((0.0, 1.0, 4.0))  # a stopped rank, after all have told
        self.silence = 15.0
        if self.kind in ("stop", "partition"):
            self.silence = draw.choice((3.0, 3.0, 3.0, 15.0))
        if self.kind == "pause_all":
            self.silence, self.duration = 3.0, draw.uniform(1, 6)
        if self.kind == "blip":
            self.duration = draw.uniform(0.2, 2)
        self.limit_only = draw.random() < 0.3  # memory: no more than now, but what is free is free
        self.signal = draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))  # of a worker
        self.hosts = [0] * self.ranks
        self.cut_host, self.cut_way, self.heals = 0, "silent", None
        if self.kind in ("partition", "blip"):
            self.by_file = False
            count = draw.randint(2, self.ranks)
            self.hosts = list(range(count)) + [draw.randrange(count)
                                               for _ in range(self.ranks - count)]
            draw.shuffle(self.hosts)
            self.cut_host = draw.randrange(count)
            self.cut_way = draw.choice(("silent", "carrier"))
            self.heals = draw.choice((None, draw.uniform(0, 3)))

    @property
    def harmless(self):
        return self.kind in HARMLESS

    @property
    def apart(self):
        return self.kind in ("partition", "blip")

    def __str__(self):
        words = [f"seed {self.seed}: {self.kind} at {self.moment}, {self.ranks} ranks, "
                 f"{self.transport}, lanes {self.lanes} by {self.worker} ({self.workers}), "
                 f"mode {self.mode}"]
        if self.apart:
            words.append(f"hosts {self.hosts}, host {self.cut_host} cut off ({self.cut_way}), "
                         f"heals {self.heals}")
        else:
            words.append(f"victims {self.victims}")
        words += [word for word, true in (("sealed", self.sealed), ("forks", self.fork),
                                          ("no progress thread", not self.progress),
                                          ("by file", self.by_file)) if true]
        words.append(f"silence {self.silence:g} s")
        return ", ".join(words)


class Metronome(threading.Thread):
    """How long this machine lets somebody wait who has work to do."""

    def __init__(self):
        super().__init__(daemon=True)
        self.late = []

    def run(self):
        while True:
            began = now()
            time.sleep(BEAT)
            late = (now() - began) / 1e9 - BEAT
            if late > BEAT:
                self.late.append((now(), late))

    def between(self, begin, end):
        return sum(late for at, late in list(self.late) if begin <= at <= end + int(2e7))


class Member:
    """A rank as a process, and what it says."""

    def __init__(self, rank, command, environment, life, folder):
        self.rank = rank
        self.lines = []
        self.log = os.path.join(folder, f"log-{rank}")
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=log, env=environment, pass_fds=(life,))
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    def all(self, word):
        return [line.split(" ", 4) for line in list(self.lines) if line.split(" ", 1)[0] == word]

    def said(self, word):
        return bool(self.all(word))

    def at(self, word):
        return int(self.all(word)[0][1])

    def ended(self):
        return self.process.poll() is not None

    def signal(self, number):
        if not self.ended():
            os.kill(self.process.pid, number)

    def end_input(self):
        if not self.process.stdin.closed:
            self.process.stdin.close()

    def children(self):
        """Lane workers, whichever thread started them."""
        found = []
        try:
            for task in os.listdir(f"/proc/{self.process.pid}/task"):
                with open(f"/proc/{self.process.pid}/task/{task}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            return []
        return [pid for pid in found if "lane-worker" in command_of(pid)]


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")
    except OSError:
        return []


def others():
    """Processes beside this one that live, with their words."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                state = file.read().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found[int(entry)] = " ".join(command_of(int(entry)))
    return found


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Run:
    """A group that is struck. After play(), `faults` says what must not be."""

    def __init__(self, scene, sample, folder):
        self.scene = scene
        self.sample = sample
        self.folder = folder
        self.faults, self.notes = [], []
        self.members = []
        self.struck = {}        # by rank: when
        self.struck_second = None
        self.went_on = None
        self.metronome = Metronome()

    # ---- the stage

    def prepare(self):
        scene = self.scene
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", self.folder], check=True)
        ip("link", "set", "lo", "up")
        if scene.apart:
            subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
            ip("link", "add", "between", "type", "bridge")
            ip("link", "set", "between", "up")
            for host in sorted(set(scene.hosts)):
                ip("netns", "add", f"host{host}")
                ip("link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns",
                   f"host{host}")
                ip("link", "set", f"port{host}", "master", "between", "up")
                ip("-n", f"host{host}", "link", "set", "lo", "up")
                ip("-n", f"host{host}", "address", "add", f"10.77.0.{host + 1}/24", "dev", "eth0")
                ip("-n", f"host{host}", "link", "set", "eth0", "up")
        self.metronome.start()

    def cut(self, whole):
        port = f"port{self.scene.cut_host}"
        if self.scene.cut_way == "silent":
            ip("link", "set", port, "nomaster" if not whole else "master",
               *(["between"] if whole else []))
        else:
            ip("link", "set", port, "up" if whole else "down")

    def start(self):
        scene = self.scene
        environment = {**os.environ, "WEFT_SECRET": secrets.token_hex(32), "TMPDIR": self.folder,
                       "WEFT_PROGRAM": self.sample, "WEFT_LOG": "*:info"}
        life, self.life = os.pipe()
        for rank in range(scene.ranks):
            host = scene.hosts[rank]
            where = (f"10.77.0.{scene.hosts[0] + 1}:4000" if scene.apart else
                     f"file:{self.folder}/meet" if scene.by_file else "127.0.0.1:4000")
            words = {"rank": rank, "ranks": scene.ranks, "rendezvous": where, "life": life,
                     "host": f"host{host}", "shm": int(scene.transport == "shm"),
                     "sealed": int(scene.sealed), "worker": scene.worker, "lanes": scene.lanes,
                     "workers": scene.workers, "mode": scene.mode, "progress": int(scene.progress),
                     "fork": int(scene.fork), "seed": scene.seed, "silence": scene.silence,
                     "join": JOIN, "settle": SETTLE, "dawdle": int(scene.moment == "leave"),
                     "wait_us": int(1e6 * scene.waits[rank])}
            command = [self.sample, *(f"{name}={value}" for name, value in words.items())]
            if scene.apart:
                command = ["ip", "netns", "exec", f"host{host}", *command]
            self.members.append(Member(rank, command, environment, life, self.folder))
        os.close(life)

    def wait(self, condition, seconds):
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                return False
            time.sleep(0.005)
        return True

    def survivors(self):
        """Those who are neither killed nor stopped."""
        return [member for member in self.members if member.rank not in self.struck]

    def told(self, members):
        """Whether all of these say that there is no group, or have left it."""
        return all(member.said("failed") or member.said("unjoined") or member.said("left")
                   or member.ended() for member in members)

    # ---- what strikes

    def play(self):
        scene = self.scene
        self.start()
        if scene.moment == "join":
            time.sleep(scene.delay)
        elif not self.wait(lambda: all(member.said("working") or member.ended()
                                       for member in self.members), 20) or any(
                                           member.ended() for member in self.members):
            self.faults.append("no group came to work")
            return self.finish()
        if scene.moment == "work":
            time.sleep(scene.delay)
        if scene.moment == "leave":
            for member in self.members:
                member.end_input()
            self.wait(lambda: any(member.said("leaving") for member in self.members), 10)
            time.sleep(scene.delay)
        if scene.moment == "rebuild":
            time.sleep(scene.delay)
            first = self.members[scene.victims[0]]
            self.struck[first.rank] = now()
            first.signal(signal.SIGKILL)
            if not self.wait(lambda: any(member.said("rebuilding") or member.ended()
                                         for member in self.survivors()), SECOND + 5):
                self.faults.append("nobody noticed the first death")
            time.sleep(scene.delay_again)
            self.strike([scene.victims[1]])
            self.struck_second = self.struck[scene.victims[1]]
        else:
            self.strike(scene.victims[:2] if scene.kind == "two" else scene.victims[:1])
        if scene.harmless:
            time.sleep(0.5)
            for member in self.members:
                member.end_input()
        self.finish()

    def strike(self, victims):
        scene = self.scene
        victim = self.members[victims[0]]
        if scene.kind in ("kill", "term", "two"):
            for rank in victims:
                self.struck[rank] = now()
                self.members[rank].signal(
                    signal.SIGTERM if scene.kind == "term" else signal.SIGKILL)
        elif scene.kind == "stop":
            self.struck[victim.rank] = now()
            victim.signal(signal.SIGSTOP)
            limit = scene.silence + JOIN + GRACE + 10
            if scene.moment != "rebuild":
                if not self.wait(lambda: self.told(self.survivors()), limit):
                    self.faults.append("not all survivors told of the stopped rank")
            elif scene.whole and not self.wait(lambda: all(
                    member.ended() for member in self.survivors()), limit + JOIN):
                self.faults.append("not all survivors ended without the stopped rank")
            time.sleep(scene.goes_on)
            self.went_on = now()
            victim.signal(signal.SIGCONT)
        elif scene.kind == "pause":
            victim.signal(signal.SIGSTOP)
            time.sleep(scene.duration)
            victim.signal(signal.SIGCONT)
        elif scene.kind == "pause_all":
            stopped = [member.process.pid for member in self.members]
            if scene.whole:
                stopped += [pid for member in self.members for pid in member.children()]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(scene.duration)
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
        elif scene.kind == "blip":
            self.cut(False)
            time.sleep(scene.duration)
            self.cut(True)
        elif scene.kind == "partition":
            self.cut_at = now()
            self.cut(False)
            if not self.wait(lambda: self.told(self.members), scene.silence + 10):
                self.faults.append("not all ranks told of the partition")
            if scene.heals is not None:
                time.sleep(scene.heals)
                self.cut(True)
        elif scene.kind == "memory":
            if scene.limit_only:
                with open(f"/proc/{victim.process.pid}/statm") as file:
                    size = int(file.read().split()[0]) * resource.getpagesize()
                self.struck[victim.rank] = now()
                resource.prlimit(victim.process.pid, resource.RLIMIT_AS,
                                 (size, resource.RLIM_INFINITY))
                time.sleep(1)
                for member in self.members:
                    member.end_input()
            else:
                victim.signal(signal.SIGUSR1)
                if not self.wait(lambda: victim.said("struck") or victim.ended(), 5):
                    self.faults.append("the victim still has memory")
                self.struck[victim.rank] = victim.at("struck") if victim.said("struck") else now()
        elif scene.kind == "worker":
            workers = victim.children()
            if not workers:
                self.faults.append("the rank has no lane workers")
                return
            os.kill(random.Random(scene.seed).choice(workers), scene.signal)
            # One that stands still is found out after 5 s.
            time.sleep(7 if scene.signal == signal.SIGSTOP else 1)

    # ---- the end

    def finish(self):
        patience = 3 * JOIN + self.scene.silence + 15
        if not self.wait(lambda: all(member.ended() for member in self.members), patience):
            for member in self.members:
                if not member.ended():
                    self.faults.append(f"rank {member.rank} hangs")
                    member.signal(signal.SIGKILL)
                    member.process.wait()
        os.close(self.life)
        # What ends is not always gone at once: the kernel takes a run's networks apart meanwhile.
        if not self.wait(lambda: not others(), 10):
            self.faults.append(f"processes are left: {others()}")
        for member in self.members:
            member.reader.join(2)
        self.look_for_names()
        files = [name for name in os.listdir(self.folder) if not name.startswith("log-")]
        if files and not (self.scene.moment == "join" and 0 in self.struck):
            # Rank 0 removes the file by which it is met, unless it dies before.
            self.faults.append(f"files are left: {files}")

    def look_for_names(self):
        left = os.listdir("/dev/shm")
        if not left:
            return
        # A rank that is killed while a lane opens cannot remove its memory's name; whoever opens
        # the next lane does (docs/wire.md). Anybody else's must be gone.
        if self.scene.kind not in ("kill", "term", "two") and self.scene.moment != "rebuild":
            self.faults.append(f"names are left in /dev/shm: {left}")
            return
        sweep = [subprocess.Popen(
            [self.sample, f"rank={rank}", "ranks=2", "rendezvous=127.0.0.1:4001", "host=host0",
             "shm=1", "lanes=1", "worker=driver", "workers=1", "mode=d", "progress=1", "join=6",
             "silence=15"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            env={**os.environ, "WEFT_SECRET": "00" * 16}) for rank in range(2)]
        for process in sweep:
            process.wait(timeout=20)
        if os.listdir("/dev/shm"):
            self.faults.append(f"names stay in /dev/shm: {os.listdir('/dev/shm')}")
        else:
            self.notes.append("a name in /dev/shm was removed by the next job")


def end_with_the_driver():
    """The one who started this run holds its input open; when it dies, so does everything here."""
    def watch():
        os.read(0, 1)
        os._exit(1)
    threading.Thread(target=watch, daemon=True).start()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
