"""Quantized linear modules of the kinds that torchao and bitsandbytes make, without either package.

    WrappedWeight   torchao: an ordinary `nn.Linear` whose weight is a tensor class that knows few
                    operations; its numbers are in tensors that it wraps
    EightBitLinear  bitsandbytes, LLM.int8: int8 weights, and activations rounded together
    FourBitLinear   bitsandbytes, NF4: weights two to a byte, not in the shape of the matrix

They are the plainest codes of their kinds: one scale per row, no outliers and no blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class WrappedWeight(torch.Tensor):
    """Matrix of int8 numbers and scales that multiplies rows, and can do little else."""

    values: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scales: Tensor) -> WrappedWeight:
        make: Any = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
        return make(cls, values.shape, dtype=scales.dtype, device=values.device)

    def __init__(self, values: Tensor, scales: Tensor) -> None:
        self.values, self.scales = values, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any, stride: Any) -> Any:
        del context, size, stride
        return cls(parts["values"], parts["scales"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            rows, weight, *bias = args
            return functional.linear(rows, weight.values * weight.scales, *bias, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types, kwargs
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scales)
        raise NotImplementedError(f"WrappedWeight does not know {func}.")


class EightBitLinear(nn.Linear):
    """Linear module with int8 weights that rounds each row of activations to int8 as well."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, "meta")
        values, self.scales = rounded(plain.weight.detach(), 127)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.bias = plain.bias

    def forward(self, input: Tensor) -> Tensor:
        values, scales = rounded(input, 127)
        own = values.to(input.dtype) * scales
        return functional.linear(own, self.weight.to(input.dtype) * self.scales, self.bias)


class FourBitLinear(nn.Linear):
    """Linear module with weights of 4 bits, two to a byte of a single column."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, "meta")
        values, self.scales = rounded(plain.weight.detach(), 7)
        codes = (values + 7).to(torch.uint8).flatten()
        self.weight = nn.Parameter((codes[::2] << 4 | codes[1::2])[:, None], requires_grad=False)
        self.bias = plain.bias

    def forward(self, input: Tensor) -> Tensor:
        codes = torch.cat([self.weight >> 4, self.weight & 15], dim=1)
        values = codes.view(self.out_features, self.in_features).to(input.dtype) - 7
        return functional.linear(input, values * self.scales.to(input.dtype), self.bias)


def wrapped(plain: nn.Linear) -> nn.Linear:
    """Copy of a module with its weight in a tensor class."""
    plain.weight = nn.Parameter(WrappedWeight(*rounded(plain.weight.detach(), 127)), False)
    return plain


def rounded(numbers: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Integers of each row from -`largest` to `largest`, and the row's scale."""
    scales = numbers.float().abs().amax(-1, keepdim=True).clamp(min=1e-6) / largest
    return (numbers / scales).round().to(torch.int8), scales.to(numbers.dtype)


QUANTIZERS: dict[str, Callable[[nn.Linear], nn.Linear]] = {
    "wrapped int8": wrapped,
    "int8 rows": EightBitLinear,
    "packed int4": FourBitLinear,
}


def quantized(module: Any, name: str) -> Any:
    """A model, changed in place, with the linear modules of its layers quantized."""
    found = [(key, part) for key, part in module.named_modules() if type(part) is nn.Linear]
    for key, part in found:
        if part is not module.lm_head:
            module.set_submodule(key, QUANTIZERS[name](part))
    return module
