"""Products with weights. On a CPU no row depends on the others, to the bit.

There (float32, MKL) that holds for at least `least_rows` rows, `least_columns` columns and at most _INNER summands (docs/log.md), so
callers pad and longer sums are split. Knows nothing of passes. Example: `linear(x, layer.qkv)`.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

_INNER = 512


class Linear(NamedTuple):
    """x @ matrix + bias."""

    matrix: Float[Tensor, "K N"]
    bias: Float[Tensor, " N"] | None


def least_rows(device: torch.device) -> int:
    """Return the number of rows below which a product rounds differently: on a CPU 16, or 8 for each thread."""
    return max(16, 8 * torch.get_num_threads()) if device.type == "cpu" else 1


def least_columns(device: torch.device) -> int:
    """Return the number of a matrix's columns below which a product rounds differently: on a CPU 12, here 16."""
    return 16 if device.type == "cpu" else 1


def inner_spans(size: int, device: torch.device) -> list[slice]:
    """Return the stretches into which a sum of `size` products is split."""
    step = _INNER if device.type == "cpu" else max(1, size)
    return [slice(start, start + step) for start in range(0, size, step)]


def linear(x: Float[Tensor, "M K"], layer: Linear) -> Float[Tensor, "M N"]:
    """Return x @ matrix + bias of at least `least_rows` rows and `least_columns` columns."""
    first, *others = inner_spans(x.shape[1], x.device)
    out = x[:, first] @ layer.matrix[first] if others else x @ layer.matrix
    for span in others:
        out.addmm_(x[:, span], layer.matrix[span])
    return out if layer.bias is None else out.add_(layer.bias)


def add_linear(x: Float[Tensor, "M K"], layer: Linear, onto: Float[Tensor, "M N"]) -> None:
    """Add x @ matrix + bias to `onto`."""
    if x.dtype != torch.float32:  # their fused sums depend on the number of rows
        onto.add_(linear(x, layer))
        return
    for span in inner_spans(x.shape[1], x.device):
        onto.addmm_(x[:, span], layer.matrix[span])
    if layer.bias is not None:
        onto.add_(layer.bias)
