"""Models for runs in which nothing is dilated or shrunk: made of layers, so that a test can say what it wants."""
import json

# Many small layers, as a network of blocks and norms has them; and a few large ones.
MANY = {"name": "many-layers", "layers": 96, "parameters": 16_000_000, "compute_ms": 150}
FEW = {"name": "few-layers", "layers": 10, "parameters": 9_000_000, "compute_ms": 90}


def write_model(path, name, layers, parameters, compute_ms, growth=1.0):
    """A third of the time is forward; each layer has a weight and a bias, `growth` times those of the layer before."""
    shares = [growth ** i for i in range(layers)]
    weights = [max(64, int(parameters * share / sum(shares))) for share in shares]
    forward = compute_ms * 1e3 / 3 / layers
    document = {
        "weft_model": 1, "name": name, "source": "made for tests", "device": "a timer", "batch": 1, "update_gb_per_s": 100,
        "layers": [{"name": f"layer{i}", "forward_us": round(forward, 1), "backward_us": round(2 * forward, 1),
                    "tensors": [{"name": f"layer{i}.weight", "shape": [weight]}, {"name": f"layer{i}.bias", "shape": [64]}]}
                   for i, weight in enumerate(weights)]}
    with open(path, "w") as file:
        json.dump(document, file)
    return path
