"""The vocabulary-free view of a pass: what drafters and traces keep of the logits of one state's masked positions.

A few best tokens, the mass of the rest, the entropy (method.md section 6): enough to predict the commit order, and small. Knows nothing
of rules, noise or drafts.

Example: `read_outputs(state.masked, logits).log_rest` is log(1 - p1) of every masked position, exact where p1 rounds to 1.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from spot_dlm.transition import Sampling, temper

NUM_TOP = 16
"""Tokens kept of every distribution; what lies outside costs a guess at times and never an answer."""

MAX_SURENESS = 40.0
"""Largest sureness -log(1 - p) that is told apart."""

_FLOOR = -80.0
"""Log-probabilities below it are all the same to a drafter (and exp stays a normal float32)."""


@dataclass(frozen=True)
class Outputs:
    """Distributions of m masked positions: their best tokens (descending, the lower id first on ties) and what is left.

    `logp` are log-probabilities of the raw logits, `source` those after temperature, `scores` what the draw maximises before noise
    (minus infinity where a filter removed the token).
    """

    positions: Int64[np.ndarray, " m"]
    ids: Int64[np.ndarray, "m K"]
    logp: Float32[np.ndarray, "m K"]
    source: Float32[np.ndarray, "m K"]
    scores: Float32[np.ndarray, "m K"]
    log_rest: Float32[np.ndarray, " m"]
    entropy: Float32[np.ndarray, " m"]

    def take(self, at: Int64[np.ndarray, " n"]) -> "Outputs":
        """Return the chosen rows."""
        fields = (self.positions, self.ids, self.logp, self.source, self.scores, self.log_rest, self.entropy)
        return Outputs(*(values[at] for values in fields))


def read_outputs(
    positions: Int64[np.ndarray, " m"], logits: Float[Tensor, "m V"], sampling: Sampling | None = None, num_top: int = NUM_TOP
) -> Outputs:
    """Summarise logits; O(m V) on their device, then one small copy.

    Args:
        positions: masked positions inside the block.
        logits: their raw logits.
        sampling: temperature and filters of the draw; None is plain argmax.
        num_top: tokens to keep (fewer where the vocabulary is smaller).
    """
    sampling = sampling or Sampling()
    count = min(num_top, logits.shape[-1])
    logits = logits.float()
    top, ids = logits.topk(count, dim=-1)
    if bool((top[:, 1:] == top[:, :-1]).any()):  # topk leaves the order of equal logits open
        ids, order = ids.sort(dim=-1)
        top, again = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, again)
    gaps = (logits - top[:, :1]).clamp_(min=_FLOOR)
    odds = gaps.exp()
    total = odds.sum(dim=-1)
    entropy = total.log() - (odds.mul_(gaps)).sum(dim=-1) / total
    rest = (gaps.scatter_(-1, ids[:, :1], _FLOOR)).exp_().sum(dim=-1)
    log_top = -torch.log1p(rest)
    logp = (top - top[:, :1]).clamp_(min=_FLOOR) + log_top[:, None]
    parts = [logp, rest.log()[:, None] + log_top[:, None], entropy[:, None]]
    temperature = sampling.temperature
    if temperature not in (0.0, 1.0):
        parts.append(temper(top, temperature) - temper(logits, temperature).logsumexp(dim=-1, keepdim=True))
    table = torch.cat(parts, dim=1).cpu().numpy()
    host, log_rest, spread = table[:, :count], table[:, count], table[:, count + 1]
    source = host if temperature in (0.0, 1.0) else np.maximum(table[:, count + 2 :], np.float32(_FLOOR))
    return Outputs(positions, ids.cpu().numpy(), host, source, _filtered(source, sampling), log_rest, spread)


def _filtered(source: Float32[np.ndarray, "m K"], sampling: Sampling) -> Float32[np.ndarray, "m K"]:
    """Remove what top-k and top-p remove; the best token always stays."""
    if sampling.temperature == 0 or (not sampling.top_k and sampling.top_p >= 1):
        return source
    scores = source.copy()
    if sampling.top_k:
        scores[:, sampling.top_k :] = -np.inf
    if sampling.top_p < 1:
        kept = np.exp(scores)
        kept /= kept.sum(axis=1, keepdims=True) if sampling.top_k else 1
        removed = np.cumsum(kept, axis=1) - kept >= sampling.top_p
        removed[:, 0] = False
        scores[removed] = -np.inf
    return scores
