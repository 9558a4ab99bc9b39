"""Files as nobody should write them: traces, plans and models, changed by chance under a seed.

A change that stops at a checksum tests the checksum alone, so most changes of a trace are made
inside a block, whose checksum is then put right (docs/trace_format.md).
"""
import json
import math
import struct

from xxhash import xxh3_64_intdigest as xxh3

HEADER_BYTES, BLOCK_HEADER = 64, struct.Struct("<4sIQQIHH")
MAGIC = bytes.fromhex("ae577cb1")
EVENT_BYTES = 72
# Offset and size of each field of an event.
EVENT_FIELDS = [(0, 8), (8, 8), (16, 8), (24, 8), (32, 4), (36, 4), (40, 4), (44, 4), (48, 4),
                (52, 4), (56, 2), (58, 2), (60, 2), (62, 2), (64, 2), (66, 2), (68, 1), (69, 1),
                (70, 2)]
NUMBERS = {3: 4, 4: 4, 5: 4, 6: 4, 13: 1, 14: 8, 15: 8, 16: 1}  # fields of an environment, by size
ENVIRONMENT, MODEL, EVENTS, CLOCK_SAMPLES, PINGS, PROBE, NOTES, DEFINITIONS, CLOSING = range(1, 10)

FACTORS = [0.0, -0.0, 0.5, 0.999, -1.0, 1.0, 1.5, 1e6, 1e6 + 1, 1e300, 5e-324, math.nan, math.inf,
           -math.inf]
# Changes that mean little when the file of one rank alone has them.
OF_ALL_RANKS = ("change_environment", "change_model", "repeat_events", "one_field_everywhere",
                "vast_tensors", "many_layers_and_iterations")


def edge(rng, size):
    """A number of `size` bytes that code tends to be wrong about, as bytes."""
    bits = 8 * size
    if size == 8 and rng.random() < 0.2:
        return struct.pack("<d", rng.choice(FACTORS))
    value = rng.choice([0, 1, 2, 3, 255, 256, 65534, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 2,
                        2**32 - 1, 2**32, 2**53 + 1, 2**61, 2**61 + 1, 2**62, 2**62 + 1, 2**63 - 1,
                        2**63, 2**64 - 1, 1 << rng.randrange(bits), rng.getrandbits(bits),
                        rng.randrange(1000), -rng.randrange(1, 1000)])
    return (value % (1 << bits)).to_bytes(size, "little")


class Block:
    def __init__(self, kind, payload, count, version=1, sequence=None):
        self.kind, self.payload, self.count, self.version = kind, bytearray(payload), count, version
        self.sequence = sequence  # None: its place in the file

    def copy(self):
        return Block(self.kind, self.payload, self.count, self.version, self.sequence)

    def packed(self, place):
        sequence = place if self.sequence is None else self.sequence
        rest = struct.pack("<QIHH", sequence, self.count, self.kind, self.version) + self.payload
        return struct.pack("<4sIQ", MAGIC, len(self.payload), xxh3(bytes(rest))) + rest


class File:
    """A trace file as blocks that can be changed and put together again."""

    def __init__(self, data):
        self.header, self.blocks, at = data[:HEADER_BYTES], [], HEADER_BYTES
        while at < len(data):
            _, length, _, _, count, kind, version = BLOCK_HEADER.unpack_from(data, at)
            at += BLOCK_HEADER.size
            self.blocks.append(Block(kind, data[at:at + length], count, version))
            at += length

    def packed(self):
        return self.header + b"".join(b.packed(i) for i, b in enumerate(self.blocks))

    def of(self, kind):
        return [block for block in self.blocks if block.kind == kind]

    def fields(self, change):
        """Gives each field of every environment to `change(id, value)`, for its new value."""
        for block in self.of(ENVIRONMENT):
            out, at = bytearray(), 0
            while at < len(block.payload):
                name, _, length = struct.unpack_from("<HHI", block.payload, at)
                value = change(name, bytes(block.payload[at + 8:at + 8 + length]))
                out += struct.pack("<HHI", name, 0, len(value)) + value
                at += 8 + length
            block.payload = out

    def as_rank(self, rank, ranks):
        change = {3: struct.pack("<I", rank), 4: struct.pack("<I", rank),
                  5: struct.pack("<I", ranks), 2: b"host%d" % rank}
        self.fields(lambda name, value: change.get(name, value))
        return self


# ---- traces ------------------------------------------------------------------------------------


def flip_bits(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def cut(rng, data):
    return data[:rng.randrange(len(data))]


def splice(rng, data, others):
    other = rng.choice(others)
    return data[:rng.randrange(len(data))] + other[rng.randrange(len(other)):]


def change_blocks(rng, file):
    blocks = file.blocks
    for _ in range(rng.randrange(1, 4)):
        at, other = rng.randrange(len(blocks)), rng.randrange(len(blocks))
        what = rng.randrange(5)
        if what == 0:
            blocks.insert(other, blocks[at].copy())
        elif what == 1:
            blocks[at], blocks[other] = blocks[other], blocks[at]
        elif what == 2 and len(blocks) > 1:
            del blocks[at]
        elif what == 3:
            blocks[at].sequence = int.from_bytes(edge(rng, 8), "little")
        else:
            blocks[at].kind, blocks[at].version = rng.randrange(12), rng.choice([1, 1, 0, 2])


def change_payload(rng, file):
    """Bits or numbers anywhere in a block, past its checksum."""
    for _ in range(rng.choice([1, 1, 4, 16])):
        block = rng.choice(file.blocks)
        if not block.payload:
            continue
        size = rng.choice([1, 2, 4, 8])
        at = rng.randrange(len(block.payload))
        block.payload[at:at + size] = edge(rng, size)[:len(block.payload) - at]


def change_counts(rng, file):
    """Counts that promise more than there is."""
    block = rng.choice(file.blocks)
    huge = rng.choice([0, 1, 65535, 65536, 2**20, 2**31, 2**32 - 1])
    if block.kind == EVENTS and rng.random() < 0.7:
        struct.pack_into("<I", block.payload, rng.choice([8, 12]), huge)
    elif block.kind == MODEL and rng.random() < 0.7:
        length, = struct.unpack_from("<I", block.payload)
        struct.pack_into("<I", block.payload, 4 + length, huge)
    elif block.kind == DEFINITIONS and rng.random() < 0.7:
        struct.pack_into("<I", block.payload, rng.choice([0, 4]), huge)
    else:
        block.count = huge


def events_of(block):
    """Where the events of a block begin."""
    return len(block.payload) - EVENT_BYTES * block.count


def change_events(rng, file):
    """One field of one event, or the same one of many, gets a strange value."""
    for _ in range(rng.randrange(1, 4)):
        block = rng.choice([b for b in file.of(EVENTS) if b.count] or [None])
        if block is None:
            return
        at, size = rng.choice(EVENT_FIELDS)
        value = edge(rng, size)
        share = rng.choice([0.0, 0.1, 1.0])
        chosen = rng.randrange(block.count)
        for i in range(block.count):
            if i == chosen or rng.random() < share:
                where = events_of(block) + EVENT_BYTES * i + at
                block.payload[where:where + size] = value if rng.random() < 0.8 else edge(rng, size)


def change_environment(rng, file, plans):
    which = rng.choice([*NUMBERS, 14, 15, 12, 12, 1, 2, 9, 17])
    if which in (14, 15):
        value = struct.pack("<d", rng.choice(FACTORS))
    elif which in NUMBERS:
        value = edge(rng, NUMBERS[which])
    elif which == 12:
        value = change_plan(rng, rng.choice(plans))
    elif which in (9, 17):
        key = rng.choice([b"link_bits_per_s", b"flow_bits_per_s", b"hosts", b"x" * 70000])
        text = rng.choice([b"nan", b"-1", b"0", b"1e999", b"[" * 5000, b"99999999999999999999"])
        value = struct.pack("<I", len(key)) + key + text
    else:
        value = rng.choice([b"", b"\xff\xfe\x1b[2J\n", b"a" * 100000, b"</script><b>"])
    done = []

    def change(name, old):
        if name != which or (which in (9, 17) and done):
            return old
        done.append(name)
        return value
    for block in file.of(ENVIRONMENT):
        done.clear()
        one = File.__new__(File)
        one.blocks = [block]
        one.fields(change)


def change_model(rng, file, layers=None, tensors=None):
    """Other tensors: many, vast, of no size, or of layers that are not there."""
    layers = layers or rng.choice([1, 3, 1000, 65534, 65535])
    tensors = tensors or rng.choice([0, 1, 5, 2000])
    payload = struct.pack("<I", 1) + b"m" + struct.pack("<I", layers)
    payload += b"".join(struct.pack("<I", 2) + b"l\xff" for _ in range(layers))
    for i in range(tensors):
        name = b"t%d" % rng.choice([i, 0])
        payload += struct.pack("<I", len(name)) + name + edge(rng, 8)
        payload += b"".join(struct.pack("<I", rng.randrange(layers)) for _ in range(3))
    for block in file.of(MODEL):
        block.payload, block.count = bytearray(payload), layers + tensors


def vast_tensors(rng, file):
    """Tensors of up to a TiB, in small chunks and large: much to replay, and little to read."""
    for block in file.of(MODEL):
        name, = struct.unpack_from("<I", block.payload)
        layers, = struct.unpack_from("<I", block.payload, 4 + name)
        at = 8 + name
        for _ in range(layers):
            at += 4 + struct.unpack_from("<I", block.payload, at)[0]
        while at < len(block.payload):
            at += 4 + struct.unpack_from("<I", block.payload, at)[0]
            struct.pack_into("<Q", block.payload, at, 4 << rng.randrange(10, 39))
            at += 20
    plan = {"weft_plan": 1, "chunk": rng.choice(["4KiB", "256KiB", "64MiB"]),
            "lanes": rng.choice([1, 8, 64]), "partition": rng.choice([None, "4KiB", "4MiB"])}
    file.fields(lambda name, value: json.dumps(plan).encode() if name == 12 else value)


def many_layers_and_iterations(rng, file):
    """Each is allowed, and together they are a table that no memory holds."""
    change_model(rng, file, layers=rng.choice([20_000, 65_534]), tensors=3)
    repeat_events(rng, file, iterations=True)


def repeat_events(rng, file, iterations=None):
    """The same events again and again, moved or not: what is not linear shows here."""
    block = rng.choice([b for b in file.of(EVENTS) if b.count] or [None])
    if block is None:
        return
    first = events_of(block)
    records = bytes(block.payload[first:])
    times = max(1, rng.choice([100_000, 300_000, 700_000]) // max(1, len(records)))
    shift, distinct = rng.choice([0, 0, 1, 10**7]), rng.random() < 0.5
    iterations = rng.random() < 0.5 if iterations is None else iterations
    out = bytearray()
    for turn in range(times):
        for at in range(0, len(records), EVENT_BYTES):
            event = bytearray(records[at:at + EVENT_BYTES])
            start, _, message = struct.unpack_from("<qqQ", event)
            struct.pack_into("<q", event, 0, start + turn * shift)
            if distinct and message:
                struct.pack_into("<Q", event, 16, (message + turn * 2**32) % 2**64)
            iteration, = struct.unpack_from("<I", event, 36)
            if iterations and iteration != 2**32 - 1:
                struct.pack_into("<I", event, 36, (iteration + turn * 7) % 2**32)
            out += event
    block.payload[first:] = out
    block.count = len(out) // EVENT_BYTES


def one_field_everywhere(rng, file):
    """All events of all blocks say the same of one field: one kind, one moment, one operation."""
    at, size = rng.choice(EVENT_FIELDS)
    value = edge(rng, size) if rng.random() < 0.5 else bytes([rng.randrange(17)]) + bytes(size - 1)
    for block in file.of(EVENTS):
        for i in range(block.count):
            where = events_of(block) + EVENT_BYTES * i + at
            block.payload[where:where + size] = value


def false_blocks(rng, data):
    """Beginnings of blocks that are none, each of which promises much."""
    out = bytearray(data[:rng.choice([HEADER_BYTES, len(data) // 2, len(data)])])
    length = rng.choice([0, 100, 2**16, 2**20, 16 * 2**20, 2**32 - 1])
    spacing = rng.choice([4, 8, 32, 100])
    wanted = rng.choice([2**16, 2**20, 2 * 2**20])
    beginning = (MAGIC + struct.pack("<I", length) + bytes(100))[:spacing]
    out += beginning * (wanted // spacing)
    return bytes(out) + (data[HEADER_BYTES:] if rng.random() < 0.5 else b"")


def change_trace(rng, data, others, plans):
    """A changed copy of a trace file, and the name of the change."""
    raw = {"flip_bits": flip_bits, "cut": cut, "false_blocks": false_blocks}
    inside = {"change_blocks": change_blocks, "change_payload": change_payload,
              "change_counts": change_counts, "change_events": change_events,
              "change_model": change_model, "repeat_events": repeat_events,
              "one_field_everywhere": one_field_everywhere, "vast_tensors": vast_tensors,
              "many_layers_and_iterations": many_layers_and_iterations}
    name = rng.choice([*raw, "splice", *inside, "change_events", "change_payload",
                       "change_environment", "change_environment", "several"])
    if name in raw:
        return raw[name](rng, data), name
    if name == "splice":
        return splice(rng, data, others), name
    file = File(data)
    if name == "several":
        for _ in range(3):
            rng.choice([change_payload, change_events, change_counts])(rng, file)
    elif name == "change_environment":
        change_environment(rng, file, plans)
    else:
        inside[name](rng, file)
    return file.packed(), name


# ---- plans and models --------------------------------------------------------------------------


STRANGE = [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1.5, -0.0, 1e308, "", "\0",
           "\ud800", "\u202e", "a" * 2000, "1MiB", "0B", "1024GiB", "99999999999999999999GiB",
           "1e9MiB", "nan", "ring", "[[[[", "]]]]", [], {}, [[]], [{}], {"a": {}}, [None] * 1000]


def places_of(tree, found=None):
    """Every container with every key in it."""
    found = [] if found is None else found
    if isinstance(tree, (dict, list)):
        for key in (list(tree) if isinstance(tree, dict) else range(len(tree))):
            found.append((tree, key))
            places_of(tree[key], found)
    return found


def deep(rng):
    depth = rng.choice([7, 8, 9, 64, 65, 1000, 100_000])
    start, end = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    inside = rng.choice(["1", "", '"' + "]" * depth + '"'])
    return start * depth + inside + rng.choice([end * depth, ""])


def change_tree(rng, text, rooms):
    """A JSON document with some values replaced, removed, repeated or put elsewhere."""
    tree = json.loads(text)
    for _ in range(rng.randrange(1, 4)):
        places = places_of(tree)
        if not places:
            break
        holder, key = rng.choice(places)
        what = rng.randrange(5)
        if what == 0 and isinstance(holder, dict):
            del holder[key]
        elif what == 1:
            holder[key] = rng.choice(places)[0]  # maybe itself: then it cannot be written
        elif what == 2 and isinstance(holder, list):
            holder.extend([holder[key]] * rng.choice([1, 10, 5000]))
        elif what == 3 and isinstance(holder, dict):
            holder[rng.choice(rooms)] = rng.choice(STRANGE)
        else:
            holder[key] = rng.choice(STRANGE)
    return json.dumps(tree)


def change_json(rng, text, rooms):
    text = text.decode() if isinstance(text, bytes) else text
    name = rng.choice(["tree", "tree", "tree", "deep", "brackets", "bits", "cut", "vast", "twice"])
    try:
        if name == "tree":
            out = change_tree(rng, text, rooms)
        elif name == "deep":
            # As the value of the first key, or alone, and with a string that closes too much.
            out = rng.choice([deep(rng), text.replace(":", ":" + deep(rng) + ",\"x\":", 1),
                              '{"x": "%s", "y": %s}' % ("]" * 200_000, deep(rng))])
        elif name == "brackets":
            out = text.replace('"', '"' + rng.choice("[]{}") * rng.choice([1, 70, 5000]), 1)
        elif name == "vast":
            item, count = rng.choice(["[]", "0", "{}", '"a"']), rng.choice([1000, 300_000])
            out = text.replace(":", ":[" + ",".join([item] * count) + '],"x":', 1)
        elif name == "twice":
            again = rng.choice(['"name":"a","name":"b",', '"weft_plan":1,', '"weft_model":1,'])
            out = text.replace("{", "{" + again, 1)
        else:
            raw = text.encode()
            return flip_bits(rng, raw) if name == "bits" else cut(rng, raw)
    except (ValueError, RecursionError):  # a tree that holds itself, or was cut before
        out = text[:rng.randrange(len(text) + 1)]
    return out.encode(errors="surrogatepass")


def change_plan(rng, text):
    return change_json(rng, text, ["weft_plan", "name", "buckets", "priority", "algorithm", "lanes",
                                   "chunk", "sync", "new"])


def change_weft_model(rng, text):
    return change_json(rng, text, ["weft_model", "name", "layers", "batch", "update_gb_per_s",
                                   "shape", "new"])
