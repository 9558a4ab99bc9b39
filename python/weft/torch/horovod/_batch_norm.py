"""Batch normalisation by the mean and variance of the batches of all ranks."""

from __future__ import annotations

from typing import List

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from weft.torch.horovod._calls import Sum, allgather, allreduce
from weft.torch.horovod._world import size


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose batch, in training, is that of all ranks together.

    The ranks' batches may differ in size. Unlike Horovod's it works on the processor.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-05,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalises `input`; all ranks call it alike while they train."""
        self._check_input_dim(input)
        of_batch = self.training or not self.track_running_stats
        if not of_batch or size() == 1:
            return super().forward(input)
        output, mean, variance, count = _Normalise.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count.item())
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        self.num_batches_tracked.add_(1)
        share = self.momentum
        if share is None:  # the average of all batches
            share = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


def _axes(tensor: torch.Tensor) -> List[int]:
    return [axis for axis in range(tensor.dim()) if axis != 1]


def _by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.to(like.dtype).view([1, -1] + [1] * (like.dim() - 2))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias, eps):
        channels = input.shape[1]
        count = input.numel() // channels
        wide = input.double()
        mean = wide.mean(_axes(input)) if count else wide.new_zeros(channels)
        spread = (wide - _by_channel(mean, wide)).square().sum(_axes(input))
        own = torch.cat([wide.new_tensor([count]), mean, spread]).unsqueeze(0)
        # Means and squares around them, and not sums of squares, which cancel each other out.
        counts, means, spreads = allgather(own).split([1, channels, channels], 1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        variance = (spreads + counts * (means - mean).square()).sum(0) / total
        scale = (variance + eps).rsqrt()
        normal = (input - _by_channel(mean, input)) * _by_channel(scale, input)
        ctx.save_for_backward(normal, weight, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        output = normal
        if weight is not None:
            output = normal * _by_channel(weight, input) + _by_channel(bias, input)
        return output.clone() if output is normal else output, mean, variance, total

    @staticmethod
    def backward(ctx, gradient, *_rest):
        normal, weight, scale, total = ctx.saved_tensors
        of_bias = gradient.sum(_axes(gradient))
        of_weight = (gradient * normal).sum(_axes(gradient))
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = allreduce(torch.stack([of_bias, of_weight]).double(), op=Sum) / total
            centred = gradient - _by_channel(sums[0], gradient)
            centred = centred - normal * _by_channel(sums[1], gradient)
            of_input = centred * _by_channel(scale, gradient)
            if weight is not None:
                of_input = of_input * _by_channel(weight, gradient)
        if weight is None:
            return of_input, None, None, None
        return of_input, of_weight, of_bias, None
