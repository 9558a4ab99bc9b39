"""Reads what a test of weft.torch recorded: events, layers and tensors of one rank.

Only whole files; checksums are the business of others (docs/trace_format.md).
"""

import collections
import struct

EVENT = struct.Struct("<qqQQ6I6HBBH")
Raw = collections.namedtuple("Raw", "start duration message bytes name iteration tensor bucket"
                             " operation chunk layer partition step track lane peer shape kind"
                             " reserved")
KINDS = ("other iteration forward backward update gradient_ready tensor_done operation chunk wait"
         " barrier broadcast control tcp_info reduce probe admitted processor_time data_loading host"
         " memory").split()
NONE, NONE16 = 0xFFFFFFFF, 0xFFFF


class Event(Raw):
    @property
    def end(self):
        return self.start + self.duration


class TraceFile:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.data = file.read()
        self.names, self.tracks, self.layers, self.tensors = {}, {}, [], []
        self.events, self.notes, self.closed = [], [], False
        self.rates = 0  # that the probe measured
        at = 64
        while at < len(self.data):
            magic, length, _, _, count, kind, _ = struct.unpack_from("<IIQQIHH", self.data, at)
            assert magic == 0xB17C57AE, f"no block at {at}"
            self.at = at + 32
            {2: self._model, 3: self._events, 6: self._probe, 7: self._notes, 9: self._closing}.get(
                kind, lambda _: None)(count)
            at += 32 + length

    def of(self, kind):
        """Events of a kind, in order of time."""
        number = KINDS.index(kind)
        return sorted((e for e in self.events if e.kind == number), key=lambda e: e.start)

    def _take(self, form):
        value, = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def _text(self):
        length = self._take("<I")
        self.at += length
        return self.data[self.at - length:self.at].decode()

    def _model(self, count):
        self._text()
        layers = self._take("<I")
        self.layers = [self._text() for _ in range(layers)]
        self.tensors = []
        for _ in range(count - layers):
            self.tensors.append((self._text(), self._take("<Q"), *(self._take("<I")
                                                                    for _ in range(3))))

    def _events(self, count):
        self.dropped, names, tracks = self._take("<Q"), self._take("<I"), self._take("<I")
        for _ in range(names):
            key = self._take("<I")
            self.names[key] = self._text()
        for _ in range(tracks):
            key = self._take("<H")
            self.at += 6
            self.tracks[key] = self._text()
        for _ in range(count):
            self.events.append(Event(*EVENT.unpack_from(self.data, self.at)))
            self.at += EVENT.size

    def _probe(self, count):
        # Of all ranks at a time.
        self.rates += sum(self.data[self.at + 56 * i:self.at + 56 * i + 2] == b"\x01\x02"
                          for i in range(count))

    def _notes(self, count):
        for _ in range(count):
            self._take("<q")
            self.notes.append((self._text(), self._text()))

    def _closing(self, _):
        self.closed = True
