#!/usr/bin/env python3
"""What weft.torch records of training: forward, backward and update of each module, and the rest."""

import copy
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
    """Trains as `how` says, and tells the names of layers in the order of their first forward."""
    import weft.torch

    torch.manual_seed(1)
    dist.init_process_group("weft")
    model = MODELS[name]()
    order = []
    own = {module: layer for layer, module in model.named_modules()
           if any(p.requires_grad for p in module.parameters(recurse=False))}
    hooks = [module.register_forward_pre_hook(
        lambda _, __, layer=layer: None if layer in order else order.append(layer))
             for module, layer in own.items()]
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.AdamW(parallel.parameters(), 1e-3)
    recording = weft.torch.record(parallel, optimizer if how == "given" else None)
    assert recording.on
    assert weft.torch.record(parallel) is recording, "it is recorded once"
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
    dist.destroy_process_group()
    if how == "copied":
        model(inputs).sum().backward()  # it outlives its recording
    return order


class Recorded(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="weft-torch-record-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)
        cls.runs = {}

    def run_of(self, name, how="given"):
        """Trains once; the traces of both ranks, the folder, and what the ranks answered."""
        if (name, how) not in self.runs:
            folder = os.path.join(self.folder, f"{name}-{how}")
            order = answers(run_ranks(2, train, name, how, environment={
                "WEFT_TRACE": folder, "WEFT_SHARED_MEMORY": "0", "WEFT_RECORD": "0"}, limit=120))
            traces = [TraceFile(os.path.join(folder, f"rank-{rank}.weft")) for rank in (0, 1)]
            self.runs[name, how] = traces, folder, order
        return self.runs[name, how]

    def each_model(self):
        return [self.run_of(name) for name in MODELS]

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
        for traces, folder, _ in self.each_model():
            page = folder + ".html"
            for words in (["align"], ["info"], ["show", "--by", "layer"], ["replay"], ["diagnose"],
                          ["report", "-o", page]):
                done = subprocess.run([WEFT, words[0], folder, *words[1:]], capture_output=True,
                                      text=True, timeout=120)
                self.assertEqual(done.returncode, 0, done.stderr)
                if words[0] == "replay":
                    self.assertIn("gradients went by all-reduces that the framework called",
                                  done.stdout)
            with open(page) as file:
                self.assertIn(traces[0].layers[-1], file.read())

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
