#!/usr/bin/env python3
"""What weft.torch records of training: forward, backward and update of each module, and the rest."""

import copy
import hashlib
import io
import os
import shutil
import subprocess
import tempfile
import unittest

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import answers, run_ranks
from trace_file import NONE, NONE16, TraceFile
from train_test import MODELS

WEFT = os.environ.get("WEFT", "weft")
STEPS = 8


def train(rank, name, how):
    """Trains as `how` says; tells layers in the order of their forward, and what was learnt."""
    import weft.torch

    torch.manual_seed(1)
    dist.init_process_group("gloo" if how.startswith("gloo") else "weft")
    model = MODELS[name]()
    order = []
    own = {module: layer for layer, module in model.named_modules()
           if any(p.requires_grad for p in module.parameters(recurse=False))}
    hooks = [module.register_forward_pre_hook(
        lambda _, __, layer=layer: None if layer in order else order.append(layer))
             for module, layer in own.items()]
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)
    if how == "attached":
        weft.torch.attach(parallel, optimizer)
    recording = weft.torch.record(parallel, optimizer if how == "given" else None)
    assert recording.on == (how != "gloo unrecorded")
    assert how == "gloo unrecorded" or weft.torch.record(parallel) is recording, "it is recorded once"
    samples = [(model.batch()[0], rank) for _ in range(4 * STEPS)]
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    for step, (inputs, targets) in enumerate(loader):
        if step == 2 and how == "given":  # does not train the model
            other = torch.nn.Linear(2, 2)
            other(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(other.parameters(), 0.1).step()
            parallel.eval()
            with torch.no_grad():
                parallel(inputs)
            parallel.train()
        if how == "accumulated":
            with parallel.no_sync():
                torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs), targets).backward()
        optimizer.step()
    for hook in hooks:
        hook.remove()
    if how == "copied":
        again = copy.deepcopy(model)
        again(inputs).sum().backward()
        torch.save(model, io.BytesIO())
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    dist.destroy_process_group()
    if how == "copied":
        model(inputs).sum().backward()  # it outlives its recording
    return order, digest


class Recorded(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="weft-torch-record-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.runs = {}

    def run_of(self, name, how="given"):
        """Trains once; the traces of both ranks, the folder, and what the ranks answered."""
        if (name, how) not in self.runs:
            # A machine that is busy enough leaves nothing to its probe.
            for attempt in range(3):
                folder = os.path.join(self.folder, f"{name}-{how}-{attempt}")
                told = answers(run_ranks(2, train, name, how, limit=280, environment={
                    "WEFT_TRACE": folder, "WEFT_SHARED_MEMORY": "0", "WEFT_RECORD": "0"}))
                traces = [TraceFile(f"{folder}/rank-{rank}.weft") for rank in (0, 1)]
                if all(trace.rates > 0 for trace in traces):
                    break
            self.runs[name, how] = traces, folder, [order for order, _ in told]
        return self.runs[name, how]

    def each_model(self, how="given"):
        return [self.run_of(name, how) for name in MODELS]

    def test_each_module_has_a_forward_and_a_backward_in_each_iteration(self):
        for traces, _, order in self.each_model():
            for trace in traces:
                self.assertTrue(trace.closed)
                self.assertEqual(trace.notes, [note for note in trace.notes
                                               if note[0] != "marks_refused"])
                self.assertEqual([e.iteration for e in trace.of("iteration")], list(range(STEPS)))
                trained = {trace.layers[layer] for _, _, layer, _, _ in trace.tensors}
                self.assertEqual(trained, set(trace.layers))
                for step in range(STEPS):
                    forward = [trace.layers[e.layer] for e in trace.of("forward")
                               if e.iteration == step]
                    self.assertEqual(forward, order[0])
                    backward = [trace.layers[e.layer] for e in trace.of("backward")
                                if e.iteration == step]
                    self.assertEqual(sorted(backward), sorted(trace.layers))

    def test_spans_lie_in_their_iteration_and_one_after_the_other(self):
        for traces, _, _ in self.each_model():
            for trace in traces:
                begins = {e.iteration: e for e in trace.of("iteration")}
                updates = {e.iteration: e for e in trace.of("update")}
                self.assertEqual(sorted(updates), list(range(STEPS)), "an update each, and no more")
                for step in range(STEPS):
                    parts = sorted([e for kind in ("forward", "backward", "update")
                                    for e in trace.of(kind) if e.iteration == step],
                                   key=lambda e: e.start)
                    self.assertLessEqual(begins[step].start, parts[0].start)
                    self.assertLessEqual(parts[-1].end, begins[step].end)
                    for before, after in zip(parts, parts[1:]):
                        self.assertLessEqual(before.end, after.start)
                    kinds = [e.kind for e in parts]
                    self.assertEqual(kinds, sorted(kinds), "forward, then backward, then update")

    def test_a_gradient_is_ready_when_the_backward_of_its_layer_is_over(self):
        for traces, _, _ in self.each_model():
            for trace in traces:
                for step in range(STEPS):
                    ready = [e for e in trace.of("gradient_ready") if e.iteration == step]
                    self.assertEqual(sorted(e.tensor for e in ready),
                                     list(range(len(trace.tensors))))
                    for layer in range(len(trace.layers)):
                        backward = [e for e in trace.of("backward")
                                    if (e.iteration, e.layer) == (step, layer)]
                        of_layer = [e.start for e in ready if e.layer == layer]
                        self.assertGreaterEqual(min(of_layer), backward[0].start)
                        self.assertEqual(max(of_layer), backward[-1].end)
                    wait, = [e for e in trace.of("wait") if e.iteration == step]
                    self.assertGreaterEqual(wait.start, max(e.start for e in ready))

    def test_has_processor_time_data_loading_and_memory(self):
        for traces, _, _ in self.each_model():
            for trace in traces:
                used = {(e.start, e.layer): e.duration for e in trace.of("processor_time")}
                for kind in "forward", "backward", "update":
                    for span in trace.of(kind):
                        taken = used[span.start, span.layer]
                        self.assertGreaterEqual(taken, 0)
                        # One thread: no more than the span, but for the reading of two clocks.
                        self.assertLess(taken, span.duration + 1_000_000)
                loading = trace.of("data_loading")
                # The end of the data is looked for too.
                self.assertEqual([e.iteration for e in loading], list(range(STEPS)))
                memory = trace.of("memory")
                self.assertEqual([e.iteration for e in memory], list(range(STEPS)))
                self.assertEqual({trace.names[e.name] for e in memory}, {"resident"})
                for counter in memory:
                    self.assertGreater(counter.duration, 50 << 20)
                    self.assertLess(counter.duration, 50 << 30)

    def test_gradients_say_the_bucket_that_ddp_puts_them_in(self):
        for traces, _, _ in self.each_model():
            of_rank = []
            for trace in traces:
                last = [e for e in trace.of("gradient_ready") if e.iteration == STEPS - 1]
                buckets = {}
                for event in last:
                    buckets.setdefault(event.bucket, []).append(event.bytes)
                self.assertEqual(sorted(buckets), list(range(len(buckets))))
                self.assertGreater(len(buckets), 1)
                # What DDP had summed in that iteration: a bucket each, in this order.
                begins, = [e.start for e in trace.of("iteration") if e.iteration == STEPS - 1]
                summed = [e.bytes for e in trace.of("operation") if e.start > begins]
                self.assertEqual(summed[:len(buckets)],
                                 [sum(buckets[bucket]) for bucket in sorted(buckets)])
                of_rank.append({e.tensor: e.bucket for e in last})
            self.assertEqual(*of_rank)

    def test_every_verb_of_analysis_understands_it(self):
        self.analyze("given", "gradients went by all-reduces that the framework called")

    def test_late_updates_and_their_waits_are_no_forward(self):
        for traces, _, order in self.each_model("attached"):
            for trace in traces:
                iterations = list(range(STEPS))
                self.assertEqual([e.iteration for e in trace.of("iteration")], iterations)
                # The steps of the exchange, which says itself when a gradient was ready.
                self.assertEqual(sorted({e.iteration for e in trace.of("gradient_ready")}),
                                 iterations)
                updates = trace.of("update")
                for step in iterations[:-1]:  # the last is left for a forward that never comes
                    self.assertEqual(sorted(e.layer for e in updates if e.iteration == step),
                                     list(range(len(trace.layers))))
                for step in iterations:
                    forward = [e for e in trace.of("forward") if e.iteration == step]
                    self.assertEqual(list(dict.fromkeys(trace.layers[e.layer] for e in forward)),
                                     order[0])
                    for other in updates + trace.of("wait"):
                        for span in forward:
                            self.assertFalse(other.start < span.end and span.start < other.end,
                                             (other, span))

    def test_every_verb_of_analysis_understands_an_exchange(self):
        self.analyze("attached", "under plan default")

    def analyze(self, how, said):
        for traces, folder, _ in self.each_model(how):
            page = folder + ".html"
            for words in (["align"], ["info"], ["show", "--by", "layer"], ["replay"], ["diagnose"],
                          ["report", "-o", page]):
                done = subprocess.run([WEFT, words[0], folder, *words[1:]], capture_output=True,
                                      text=True, timeout=120)
                self.assertEqual(done.returncode, 0, done.stderr)
                if words[0] == "replay":
                    self.assertIn(said, done.stdout)
            with open(page) as file:
                self.assertIn(traces[0].layers[-1], file.read())

    def test_another_backend_is_recorded_at_its_calls_and_trains_as_it_did(self):
        folder = os.path.join(self.folder, "gloo")
        recorded = answers(run_ranks(3, train, "convolutional", "gloo", limit=280,
                                     environment={"WEFT_TRACE": folder, "WEFT_RECORD": "0"}))
        plain = answers(run_ranks(3, train, "convolutional", "gloo unrecorded", limit=280,
                                  environment={"WEFT_TRACE": ""}))
        self.assertEqual([digest for _, digest in recorded], [digest for _, digest in plain])
        for rank in range(3):
            trace = TraceFile(os.path.join(folder, f"rank-{rank}.weft"))
            self.assertTrue(trace.closed)
            last = [e for e in trace.of("gradient_ready") if e.iteration == STEPS - 1]
            begins, = [e.start for e in trace.of("iteration") if e.iteration == STEPS - 1]
            summed = [e for e in trace.of("operation") if e.start > begins]
            self.assertEqual(len(summed), len({e.bucket for e in last}))
            self.assertEqual(sum(e.bytes for e in summed), sum(e.bytes for e in last))
            wait, = [e for e in trace.of("wait") if e.iteration == STEPS - 1]
            for operation in summed:
                self.assertGreater(operation.duration, 0)
                self.assertGreaterEqual(operation.start, min(e.start for e in last))
                self.assertLessEqual(operation.end, wait.end)
        for words in ["info"], ["align"], ["show", "--by", "iteration"], ["show", "--by", "layer"]:
            done = subprocess.run([WEFT, words[0], folder, *words[1:]], capture_output=True,
                                  text=True, timeout=120)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_passes_that_accumulate_are_one_iteration(self):
        for trace in self.run_of("convolutional", "accumulated")[0]:
            self.assertEqual([e.iteration for e in trace.of("iteration")], list(range(STEPS)))
            for kind, times in ("forward", 2), ("backward", 2), ("gradient_ready", 1):
                first = trace.of(kind)[0]
                same = [e for e in trace.of(kind)
                        if (e.iteration, e.layer, e.tensor) == (3, first.layer, first.tensor)]
                self.assertEqual(len(same), times, kind)

    def test_a_copy_of_a_model_is_another(self):
        for trace in self.run_of("convolutional", "copied")[0]:
            self.assertEqual([e.iteration for e in trace.of("iteration")], list(range(STEPS)))
            self.assertEqual(len(trace.of("backward")), STEPS * len(trace.layers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    unittest.main()
