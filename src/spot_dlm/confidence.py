"""How sure a position is of its token: probability, margin or entropy of a softmax, precise where it rounds to 1.

The numbers by which the unmask rule orders positions (docs/decoding-rules.md, step 3). Exponentials and sums are torch's on every
device; what needs no rounding is compiled for the host. Knows nothing of states, rules and noise.

Example: `measure(logits, first_argmax(logits), "probability")` is (log p, p) of every row's best token.
"""

from typing import Literal, no_type_check

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from numba import njit
from torch import Tensor

from spot_dlm.race import first_argmax, on_host

Confidence = Literal["probability", "max_probability", "margin", "entropy"]
Resolution = Literal["float32", "bfloat16"]


def round_to(values: Float[Tensor, "..."], resolution: Resolution) -> Float[Tensor, "..."]:
    """Round confidences as the rule compares them, to nearest even."""
    return values.to(torch.bfloat16).to(torch.float32) if resolution == "bfloat16" else values


def measure(
    source: Float32[Tensor, "m V"], tokens: Int64[Tensor, " m"], confidence: Confidence, top: Int64[Tensor, " m"] | None = None
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Return (rank, natural) confidence of `tokens` under softmax(source), sure positions resolved far below 1e-7.

    With top logit l1 and rest = sum over others of exp(l - l1): log p1 = -log1p(rest), which keeps its digits where p1
    itself rounds to 1 (method.md section 9a). A row whose top logit is infinite gives NaN. At least two rows: a lone one would be
    summed in another order, as a reduction to a scalar.

    Args:
        source: logits.
        tokens: one of each row.
        confidence: what is measured.
        top: the first argmax of `source`, where it is known.
    """
    gaps, own = _gaps(source, first_argmax(source) if top is None else top, tokens)
    odds = gaps.exp() if confidence == "entropy" else gaps.exp_()
    rest = odds.sum(dim=-1)
    logp_top = torch.log1p(rest).neg_()
    if confidence == "probability":
        rank = own.add_(logp_top)
        return rank, rank.exp()
    if confidence == "max_probability":
        return logp_top, logp_top.exp()
    if confidence == "margin":
        second = odds.amax(dim=-1)
        return -(rest + second) / (1 + rest), (1 - second) / (1 + rest)
    weighted = torch.where(odds > 0, odds * gaps, 0.0).sum(dim=-1)
    negative_entropy = weighted / (1 + rest) + logp_top
    return negative_entropy, negative_entropy


def _gaps(
    source: Float32[Tensor, "m V"], top: Int64[Tensor, " m"], tokens: Int64[Tensor, " m"]
) -> tuple[Float32[Tensor, "m V"], Float32[Tensor, " m"]]:
    """Return the logits less the top logit, and those of `tokens`.

    The top logit's own gap is minus infinity, so that its odds do not count; NaN if the logit is infinite.
    """
    if on_host(source):
        source = source.contiguous()
        gaps, own = torch.empty_like(source), source.new_empty(len(source))
        _write_gaps(source.numpy(), top.numpy(), tokens.numpy(), gaps.numpy(), own.numpy())
        return gaps, own
    top_logit = source.gather(-1, top[:, None])
    gaps = source - top_logit
    own = gaps.gather(-1, tokens[:, None])[:, 0]
    return gaps.scatter_(-1, top[:, None], top_logit - top_logit - torch.inf), own


@njit(cache=True)
@no_type_check
def _write_gaps(source: np.ndarray, top: np.ndarray, tokens: np.ndarray, gaps: np.ndarray, own: np.ndarray) -> None:
    for i in range(len(source)):
        top_logit = source[i, top[i]]
        for v in range(source.shape[1]):
            gaps[i, v] = source[i, v] - top_logit
        own[i] = gaps[i, tokens[i]]
        gaps[i, top[i]] -= np.float32(np.inf)
