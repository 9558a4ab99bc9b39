"""What a model is to a trace and to a plan: layers in forward order, and tensors that belong to them.

And where a process group's backend is found.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional

import torch

from weft.torch import _C


def backend_of(group: Any) -> Optional[Any]:
    """weft's backend of a process group, for whichever devices it is; None if it has none."""
    for device in group._device_types:
        backend = group._get_backend(device)
        if _C.is_weft(backend):
            return backend
    return None


class Tensor(NamedTuple):
    """A parameter that is trained; `layer` is the place of the module that owns it."""

    name: str
    parameter: torch.nn.Parameter
    layer: int


class Description(NamedTuple):
    layers: List[str]
    modules: List[torch.nn.Module]  # of each layer
    tensors: List[Tensor]


def describe(model: torch.nn.Module) -> Description:
    """The modules that own trained parameters, in the order in which `model` lists them, and these.

    A parameter that several modules share belongs to the first. Names are those of the model that a
    wrapper such as DistributedDataParallel was given. All ranks that have the same model get the
    same answer.
    """
    inner = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model
    layers: List[str] = []
    modules: List[torch.nn.Module] = []
    tensors: List[Tensor] = []
    known = set()
    for prefix, module in inner.named_modules():
        own = [
            (name, parameter)
            for name, parameter in module.named_parameters(prefix, recurse=False)
            if parameter.requires_grad and id(parameter) not in known
        ]
        if not own:
            continue
        layers.append(prefix or type(inner).__name__)
        modules.append(module)
        for name, parameter in own:
            known.add(id(parameter))
            tensors.append(Tensor(name, parameter, len(layers) - 1))
    return Description(layers, modules, tensors)
