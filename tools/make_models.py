#!/usr/bin/env python3
"""Writes src/lab/models/*.json: the formulae behind the numbers in those files.

Parameter shapes are those of the published models. No device was at hand, so the time of a whole
iteration is a published one, and is spread over the layers: a layer's share is the time that its
arithmetic would take at the device's peak plus the time that its memory traffic would take at the
device's memory rate. One factor then scales all layers of a model, forward and backward, so that
forward, backward and update add up to the published iteration. A factor below 1 is no mistake:
the fast algorithms for 3x3 convolutions do less arithmetic than is counted here.

Usage: tools/make_models.py [FOLDER]
"""

import json
import os
import sys

V100 = {"name": "NVIDIA Tesla V100, fp32", "flops": 15.7e12, "bytes": 900e9}
P100 = {"name": "NVIDIA Tesla P100, fp32", "flops": 10.6e12, "bytes": 732e9}


class Builder:
    def __init__(self, device, batch):
        self.device, self.batch, self.layers = device, batch, []

    def add(self, name, tensors, forward_flops, forward_bytes, input_gradient=True):
        """Adds a layer. Backward does the arithmetic twice (gradients of weights and of inputs;
        the first layer needs no gradient of its input) and moves twice the bytes."""
        arithmetic = forward_flops / self.device["flops"]
        traffic = forward_bytes / self.device["bytes"]
        backward = arithmetic * (2 if input_gradient else 1) + 2 * traffic
        self.layers.append((name, tensors, arithmetic + traffic, backward))

    def conv(self, name, cin, cout, kernel, size, passes, bias=True, norm=None, first=False):
        """A convolution with an output of size x size, and what follows it (normalisation, ReLU,
        pooling, addition), which reads or writes the output `passes` times in all."""
        output = self.batch * cout * size * size
        weights = cout * cin * kernel * kernel
        tensors = [(name + ".weight", [cout, cin, kernel, kernel])]
        if bias:
            tensors.append((name + ".bias", [cout]))
        if norm:
            tensors += [(norm + ".weight", [cout]), (norm + ".bias", [cout])]
        self.add(name, tensors, 2 * output * cin * kernel * kernel,
                 4 * (passes * output + weights), not first)

    def linear(self, name, cin, cout):
        self.add(name, [(name + ".weight", [cout, cin]), (name + ".bias", [cout])],
                 2 * self.batch * cin * cout, 4 * (cin * cout + self.batch * (cin + cout)))

    def document(self, name, iteration_ms, update_gb_per_s, source):
        parameters = sum(product(shape) for _, tensors, _, _ in self.layers for _, shape in tensors)
        update_us = 4 * parameters / (update_gb_per_s * 1e3)
        raw_us = 1e6 * sum(forward + backward for _, _, forward, backward in self.layers)
        factor = (iteration_ms * 1e3 - update_us) / raw_us
        layers = [{
            "name": layer,
            "forward_us": round(forward * 1e6 * factor, 1),
            "backward_us": round(backward * 1e6 * factor, 1),
            "tensors": [{"name": tensor, "shape": shape} for tensor, shape in tensors],
        } for layer, tensors, forward, backward in self.layers]
        spread = ("Spread over layers by arithmetic at %.1f Tflop/s plus memory traffic at %.0f GB/s, "
                  "then scaled by %.3f, by tools/make_models.py." %
                  (self.device["flops"] * 1e-12, self.device["bytes"] * 1e-9, factor))
        return {
            "weft_model": 1,
            "name": name,
            "source": "%s %s" % (source, spread),
            "device": self.device["name"],
            "batch": self.batch,
            "update_gb_per_s": update_gb_per_s,
            "layers": layers,
        }


def product(shape):
    total = 1
    for extent in shape:
        total *= extent
    return total


# An update moves each parameter's value, gradient and moments: five transfers for SGD with
# momentum, seven for Adam, at four fifths of the memory's rate.
def update_rate(device, transfers):
    return round(0.8 * device["bytes"] / transfers * 1e-9)


def alexnet():
    b = Builder(P100, 128)
    b.conv("features.0", 3, 64, 11, 55, 4, first=True)
    b.conv("features.3", 64, 192, 5, 27, 4)
    b.conv("features.6", 192, 384, 3, 13, 3)
    b.conv("features.8", 384, 256, 3, 13, 3)
    b.conv("features.10", 256, 256, 3, 13, 4)
    b.linear("classifier.1", 9216, 4096)
    b.linear("classifier.4", 4096, 4096)
    b.linear("classifier.6", 4096, 1000)
    return b.document(
        "alexnet", 1e3 * 128 / 2987, update_rate(P100, 5),
        "Shapes: torchvision's alexnet. Iteration: 128 images at 2987 images/s, measured with "
        "TensorFlow on one P100 (repository tensorflow/tensorflow, "
        "docs_src/performance/benchmarks.md, synthetic data, at batch 512).")


def vgg16():
    b = Builder(V100, 32)
    size, cin, index = 224, 3, 0
    for block, (count, cout) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)]):
        for i in range(count):
            b.conv("features.%d" % index, cin, cout, 3, size, 4 if i == count - 1 else 3,
                   first=index == 0)
            cin, index = cout, index + 2
        size, index = size // 2, index + 1
    b.linear("classifier.0", 25088, 4096)
    b.linear("classifier.3", 4096, 4096)
    b.linear("classifier.6", 4096, 1000)
    return b.document(
        "vgg16", 136.24, update_rate(V100, 5),
        "Shapes: torchvision's vgg16. Iteration: 136.24 ms at batch 32, the least published for "
        "V100 with communication all but free (repository joapolarbear/plot, tag mlsys2022, "
        "VGG16+TCP, HVD+TF, column Daydream).")


def resnet50():
    b = Builder(V100, 32)
    b.conv("conv1", 3, 64, 7, 112, 6, bias=False, norm="bn1", first=True)
    cin, size = 64, 56
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)]):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 0 else 1
            out = size // stride
            at = "layer%d.%d" % (stage + 1, block)
            b.conv(at + ".conv1", cin, width, 1, size, 5, bias=False, norm=at + ".bn1")
            b.conv(at + ".conv2", width, width, 3, out, 5, bias=False, norm=at + ".bn2")
            b.conv(at + ".conv3", width, 4 * width, 1, out, 7, bias=False, norm=at + ".bn3")
            if block == 0:
                b.conv(at + ".downsample.0", cin, 4 * width, 1, out, 4, bias=False,
                       norm=at + ".downsample.1")
            cin, size = 4 * width, out
    b.linear("fc", 2048, 1000)
    return b.document(
        "resnet50", 342.37 / 4, update_rate(V100, 5),
        "Shapes: torchvision's resnet50. Iteration: a quarter of 342.37 ms at batch 128, measured "
        "on one V100 in fp32 (repository sandeepkumar-skb/pytorch_experiments, "
        "torchvision_exp/README.md).")


def bert_base():
    sequence, hidden, inner, heads = 128, 768, 3072, 12
    b = Builder(V100, 32)
    tokens = b.batch * sequence

    def norm(name):
        return [(name + ".weight", [hidden]), (name + ".bias", [hidden])]

    def dense(name, cin, cout):
        return [(name + ".weight", [cout, cin]), (name + ".bias", [cout])]

    activation = 4 * tokens * hidden
    b.add("embeddings", [("embeddings.word_embeddings.weight", [30522, hidden]),
                         ("embeddings.position_embeddings.weight", [512, hidden]),
                         ("embeddings.token_type_embeddings.weight", [2, hidden])] +
          norm("embeddings.LayerNorm"), 0, 8 * activation + 4 * 30522 * hidden, False)
    for i in range(12):
        at = "encoder.layer.%d" % i
        tensors = []
        for part in ("query", "key", "value"):
            tensors += dense(at + ".attention.self." + part, hidden, hidden)
        tensors += dense(at + ".attention.output.dense", hidden, hidden)
        tensors += norm(at + ".attention.output.LayerNorm")
        scores = 4 * b.batch * heads * sequence * sequence
        b.add(at + ".attention", tensors,
              2 * tokens * hidden * (4 * hidden + 2 * sequence),
              16 * activation + 8 * scores + 16 * hidden * hidden)
        tensors = dense(at + ".intermediate.dense", hidden, inner)
        tensors += dense(at + ".output.dense", inner, hidden)
        tensors += norm(at + ".output.LayerNorm")
        b.add(at + ".feed_forward", tensors, 2 * tokens * 2 * hidden * inner,
              8 * activation + 6 * 4 * tokens * inner + 8 * hidden * inner)
    b.add("pooler", dense("pooler.dense", hidden, hidden), 2 * b.batch * hidden * hidden,
          8 * hidden * hidden)
    return b.document(
        "bert-base", 270.49, update_rate(V100, 7),
        "Shapes: bert-base-uncased, encoder and pooler; 128 tokens a sequence. Iteration: "
        "270.49 ms at batch 32, the least published for V100 with communication all but free "
        "(repository joapolarbear/plot, tag mlsys2022, BERT Base+RDMA, HVD+MX, column Daydream).")


def render(model):
    """JSON with a layer's numbers on one line and a tensor a line."""
    lines = ["{"]
    for key, value in model.items():
        if key != "layers":
            lines.append("  %s: %s," % (json.dumps(key), json.dumps(value)))
    lines.append('  "layers": [')
    for i, layer in enumerate(model["layers"]):
        lines.append('    {"name": %s, "forward_us": %s, "backward_us": %s, "tensors": [' %
                     (json.dumps(layer["name"]), layer["forward_us"], layer["backward_us"]))
        tensors = ["      " + json.dumps(tensor) for tensor in layer["tensors"]]
        lines.append(",\n".join(tensors) + "]}" + ("," if i + 1 < len(model["layers"]) else ""))
    lines += ["  ]", "}", ""]
    return "\n".join(lines)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    folder = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "..", "src", "lab", "models")
    for model in (alexnet(), vgg16(), resnet50(), bert_base()):
        with open(os.path.join(folder, model["name"] + ".json"), "w") as file:
            file.write(render(model))


if __name__ == "__main__":
    main()
