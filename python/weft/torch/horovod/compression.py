"""What travels instead of a tensor."""

from __future__ import annotations

from typing import Any, Tuple

import torch


class Compressor:
    """Makes a tensor smaller before it is sent, and what came back as it was; a base for others."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        """The tensor to send, and what decompress needs to know."""
        raise NotImplementedError("a compressor has a method compress(tensor)")

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received tensor, as it would be without compression."""
        raise NotImplementedError("a compressor has a method decompress(tensor, ctx)")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point numbers with 16 bits, and anything else as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> Tuple[torch.Tensor, Any]:
        small = tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor
        return small, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx) if ctx.is_floating_point else tensor


class Compression:
    """The compressors that an all-reduce can be given."""

    none = NoneCompressor
    fp16 = FP16Compressor
