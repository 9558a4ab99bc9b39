"""docs/trace_format.md is enough to write a reader from: this is one, and it agrees with weft.

Everything below is taken from that page and from nothing else. It reads the page's own example and
a run that the library wrote, whole and damaged, and compares counts and sums with `weft info` and
`weft show`.

    trace_format_doc_test.py TRACE_SAMPLE      the program that writes the sample run
"""
import collections
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import unittest

try:
    from xxhash import xxh3_64_intdigest as xxh3
except ImportError as error:
    print(f"skipped: {error}; tools/setup installs it", file=sys.stderr)
    sys.exit(77)

WEFT = os.environ["WEFT"]
SOURCE = pathlib.Path(os.environ["WEFT_SOURCE_DIR"])
SAMPLE = sys.argv.pop(1)

FILE_MAGIC = bytes.fromhex("89574546540d0a1a")
BLOCK_MAGIC = bytes.fromhex("ae577cb1")
EVENT = struct.Struct("<qqQQ6I6HBBH")
Event = collections.namedtuple("Event", "start duration message bytes name iteration tensor bucket"
                               " operation chunk layer partition step track lane peer shape kind"
                               " reserved")
SHAPES = "- span instant counter send receive".split()
KINDS = ("other iteration forward backward update gradient_ready tensor_done operation chunk wait"
         " barrier broadcast control tcp_info reduce probe admitted processor_time data_loading host"
         " memory").split()
TEXT_FIELDS = {1: "weft_version", 2: "host", 7: "kernel", 8: "congestion_control",
               10: "plan_name", 11: "plan_hash", 12: "plan_text"}
NUMBER_FIELDS = {3: ("host_index", "<I"), 4: ("rank", "<I"), 5: ("ranks", "<I"),
                 6: ("cores", "<I"), 13: ("predicted", "<B"), 14: ("dilation", "<d"),
                 15: ("shrink", "<d"), 16: ("emulated_compute", "<B")}


class Cursor:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, form):
        value, = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self):
        length = self.take("<I")
        self.at += length
        assert self.at <= len(self.data)
        return self.data[self.at - length:self.at]


class Reader:
    def __init__(self, data):
        self.data = data
        self.environment, self.names, self.tracks = {}, {}, {}
        self.layers, self.tensors, self.events, self.notes = [], [], [], []
        self.pings = self.clock_samples = self.probe = 0
        self.dropped, self.closing = 0, None
        self.blocks_lost = self.bytes_lost = 0
        self.header()
        self.blocks()

    def header(self):
        assert self.data[:8] == FILE_MAGIC, "not a trace"
        checksum, = struct.unpack_from("<Q", self.data, 56)
        assert checksum == xxh3(self.data[:56]), "the header is damaged"
        assert self.data[8:16] == bytes([1, 0, 0, 0, 0, 0, 0, 0])

    def block_at(self, at):
        if self.data[at:at + 4] != BLOCK_MAGIC or at + 32 > len(self.data):
            return None
        length, checksum, sequence, count, kind, version = struct.unpack_from(
            "<IQQIHH", self.data, at + 4)
        if length > 16 << 20 or at + 32 + length > len(self.data):
            return None
        if xxh3(self.data[at + 16:at + 32 + length]) != checksum:
            return None
        return sequence, count, kind, version, self.data[at + 32:at + 32 + length]

    def blocks(self):
        at, expected = 64, 0
        while at < len(self.data):
            block = self.block_at(at)
            if block is None:
                start = at
                while at < len(self.data) and (block := self.block_at(at)) is None:
                    found = self.data.find(BLOCK_MAGIC, at + 1)
                    at = found if found >= 0 else len(self.data)
                self.bytes_lost += at - start
                if block is None:
                    self.blocks_lost += 1
                    return
            sequence, count, kind, version, payload = block
            assert version == 1
            self.blocks_lost += sequence - expected
            expected = sequence + 1
            at += 32 + len(payload)
            decode = {1: self.take_environment, 2: self.take_model, 3: self.take_events,
                      4: self.take_clock_samples, 5: self.take_pings, 6: self.take_probe,
                      7: self.take_notes, 8: self.take_definitions, 9: self.take_closing}[kind]
            cursor = Cursor(payload)
            decode(cursor, count)
            assert cursor.at == len(payload), (kind, cursor.at, len(payload))

    def take_environment(self, cursor, count):
        environment = {"sysctls": {}, "lab": {}}
        for _ in range(count):
            field, reserved, value = cursor.take("<H"), cursor.take("<H"), cursor.text()
            assert reserved == 0
            if field in TEXT_FIELDS:
                environment[TEXT_FIELDS[field]] = value.decode()
            elif field in NUMBER_FIELDS:
                name, form = NUMBER_FIELDS[field]
                environment[name], = struct.unpack(form, value)
            elif field in (9, 17):
                inner = Cursor(value)
                key = inner.text().decode()
                environment["sysctls" if field == 9 else "lab"][key] = value[inner.at:].decode()
        assert self.environment in ({}, environment)
        self.environment = environment

    def take_model(self, cursor, count):
        self.model_name, layers = cursor.text(), cursor.take("<I")
        self.layers = [cursor.text() for _ in range(layers)]
        self.tensors = [(cursor.text(), cursor.take("<Q"), cursor.take("<I"), cursor.take("<I"),
                         cursor.take("<I")) for _ in range(count - layers)]

    def take_dictionary(self, cursor, names, tracks):
        for _ in range(names):
            key, value = cursor.take("<I"), cursor.text()
            assert self.names.setdefault(key, value) == value
        for _ in range(tracks):
            key = cursor.take("<H")
            value = tuple(cursor.take(form) for form in ("<B", "<B", "<H", "<H")), cursor.text()
            assert self.tracks.setdefault(key, value) == value

    def take_events(self, cursor, count):
        self.dropped, names, tracks = cursor.take("<Q"), cursor.take("<I"), cursor.take("<I")
        self.take_dictionary(cursor, names, tracks)
        for _ in range(count):
            event = Event(*EVENT.unpack_from(cursor.data, cursor.at))
            cursor.at += EVENT.size
            assert event.track in self.tracks and event.reserved == 0
            assert event.name == 0xffffffff or event.name in self.names
            self.events.append(event)

    def take_records(self, cursor, count, size):
        cursor.at += count * size
        return count

    def take_clock_samples(self, cursor, count):
        self.clock_samples += self.take_records(cursor, count, 16)

    def take_pings(self, cursor, count):
        self.pings += self.take_records(cursor, count, 40)

    def take_probe(self, cursor, count):
        self.probe += self.take_records(cursor, count, 56)

    def take_notes(self, cursor, count):
        for _ in range(count):
            self.notes.append((cursor.take("<q"), cursor.text(), cursor.text()))

    def take_definitions(self, cursor, count):
        names, tracks = cursor.take("<I"), cursor.take("<I")
        assert names + tracks == count
        self.take_dictionary(cursor, names, tracks)

    def take_closing(self, cursor, _):
        self.closing = [cursor.take("<Q") for _ in range(6)]
        self.dropped = self.closing[5]


def weft(*arguments):
    return json.loads(subprocess.run([WEFT, *arguments, "--json"], check=True, timeout=60,
                                     stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


class Document(unittest.TestCase):
    def test_example(self):
        page = (SOURCE / "docs" / "trace_format.md").read_text()
        lines = re.findall(r"^[0-9a-f]{6}  ((?:[0-9a-f]{2} ?)+)", page, re.M)
        trace = Reader(bytes.fromhex("".join(lines)))
        self.assertEqual(trace.environment["host"], "a")
        self.assertEqual(trace.environment["sysctls"], {"key": "value"})
        self.assertEqual(trace.tensors, [(b"w", 64, 0, 0, 0xffffffff)])
        self.assertEqual([event.start for event in trace.events], [1000, 1500])
        self.assertEqual(trace.names, {0: b"hello"})
        self.assertEqual(trace.notes, [(1600, b"k", b"v")])
        self.assertEqual(trace.closing, [2, 0, 0, 0, 1, 0])


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.run_folder = folder.name
        # Large enough for several events blocks a file.
        subprocess.run([SAMPLE, folder.name, "100"], check=True, timeout=60)

    def test_whole(self):
        info = weft("info", self.run_folder)
        self.assertEqual(info["damage"], [])
        counts, totals, sent = collections.Counter(), collections.Counter(), collections.Counter()
        for process in info["processes"]:
            trace = Reader(pathlib.Path(process["file"]).read_bytes())
            self.assertEqual((trace.blocks_lost, trace.bytes_lost), (0, 0))
            for field in "rank", "host", "host_index", "cores", "kernel", "congestion_control", \
                    "sysctls":
                self.assertEqual(trace.environment[field], process[field])
            for field in "events", "notes", "tracks":
                self.assertEqual(len(getattr(trace, field)), process[field])
            for field in "pings", "clock_samples", "probe", "dropped":
                self.assertEqual(getattr(trace, field), process[field])
            self.assertEqual(trace.closing, [len(trace.events), trace.clock_samples, trace.pings,
                                             trace.probe, len(trace.notes), trace.dropped])
            self.assertEqual(trace.environment["lab"], info["lab"])
            self.assertEqual(len(trace.layers), info["model"]["layers"])
            self.assertEqual(len(trace.tensors), info["model"]["tensors"])
            spans = {(event.track, event.start, event.layer, event.iteration): KINDS[event.kind]
                     for event in trace.events if SHAPES[event.shape] == "span"}
            times = [event for event in trace.events if KINDS[event.kind] == "processor_time"]
            self.assertTrue(times)
            for event in times:
                self.assertEqual(SHAPES[event.shape], "counter")
                place = event.track, event.start, event.layer, event.iteration
                self.assertIn(spans[place], ("forward", "backward", "update"))
            scale = trace.environment["shrink"] / trace.environment["dilation"]
            for event in trace.events:
                shape, kind = SHAPES[event.shape], KINDS[event.kind]
                key = kind if shape == "span" else f"{shape} {kind}"
                counts[key] += 1
                totals[key] += 0 if shape == "counter" else event.duration * scale
                sent[key] += event.bytes * trace.environment["shrink"]
        rows = {row["what"]: row for row in weft("show", self.run_folder, "--by", "kind")["rows"]}
        self.assertEqual({what: row["count"] for what, row in rows.items()}, dict(counts))
        for what, row in rows.items():
            self.assertAlmostEqual(row["total_ns"], totals[what], delta=1e-6 * totals[what])
            self.assertEqual(row["bytes"], sent[what])

    def test_damaged(self):
        path = pathlib.Path(self.run_folder) / "rank-1.weft"
        whole = path.read_bytes()
        for at in len(whole) // 2, len(whole) - 20:
            for data in whole[:at], whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1:]:
                path.write_bytes(data)
                trace = Reader(data)
                info = weft("info", str(path))
                damage, = info["damage"]
                self.assertEqual(trace.bytes_lost, damage["bytes_lost"])
                self.assertEqual(trace.blocks_lost, damage["blocks_lost"])
                self.assertEqual(trace.closing is None, damage["unfinished"])
                self.assertEqual(len(trace.events), info["processes"][0]["events"])
                self.assertEqual(trace.dropped, info["processes"][0]["dropped"])


if __name__ == "__main__":
    unittest.main()
