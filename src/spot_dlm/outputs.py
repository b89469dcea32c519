"""The vocabulary-free view of a pass: what drafters and traces keep of the logits of one state's masked positions.

A few best tokens, the mass of the rest, the entropy (method.md section 6): enough to predict the commit order, and small. Compiled for
logits in the host's memory; elsewhere torch does the same on their device, then one small copy. Knows nothing of rules, noise or drafts.

Example: `read_outputs(state.masked, logits).log_rest` is log(1 - p1) of every masked position, exact where p1 rounds to 1.
"""

from dataclasses import dataclass
from typing import no_type_check

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from numba import njit
from torch import Tensor

from spot_dlm.transition import Sampling, temper

NUM_TOP = 16
"""Tokens kept of every distribution; what lies outside costs a guess at times and never an answer."""

MAX_SURENESS = 40.0
"""Largest sureness -log(1 - p) that is told apart."""

_FLOOR = -80.0
"""Log-probabilities below it are all the same to a drafter (and exp stays a normal float32)."""

_CHUNK, _FEW = 64, 32
"""Tokens looked at together when the best are sought; more kept tokens than the second are left to torch, which sorts them better."""

_SUM = 2048
"""Numbers added up in float32, in several lanes, before float64 takes over."""


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
        ids, logp, source = self.ids[at], self.logp[at], self.source
        source = logp if source is self.logp else source[at]
        scores = source if self.scores is self.source else self.scores[at]
        return Outputs(self.positions[at], ids, logp, source, scores, self.log_rest[at], self.entropy[at])


def read_outputs(
    positions: Int64[np.ndarray, " m"], logits: Float[Tensor, "m V"], sampling: Sampling | None = None, num_top: int = NUM_TOP
) -> Outputs:
    """Summarise logits; O(m V).

    Args:
        positions: masked positions inside the block.
        logits: their raw logits.
        sampling: temperature and filters of the draw; None is plain argmax.
        num_top: tokens to keep (fewer where the vocabulary is smaller).
    """
    sampling = sampling or Sampling()
    count, temperature = min(num_top, logits.shape[-1]), sampling.temperature
    tempered = temperature not in (0.0, 1.0)
    read = _on_host if logits.device.type == "cpu" and count <= _FEW else _on_device
    ids, logp, source, log_rest, entropy = read(logits.float(), count, temperature if tempered else 1.0)
    return Outputs(positions, ids, logp, source, _filtered(source, sampling), log_rest, entropy)


_Summary = tuple[
    Int64[np.ndarray, "m K"], Float32[np.ndarray, "m K"], Float32[np.ndarray, "m K"], Float32[np.ndarray, " m"], Float32[np.ndarray, " m"]
]
"""Best tokens, their log-probabilities, those after temperature, log(1 - p1) and entropy."""


def _on_host(logits: Float[Tensor, "m V"], count: int, temperature: float) -> _Summary:
    rows = len(logits)
    ids, logp = np.empty((rows, count), np.int64), np.empty((rows, count), np.float32)
    source = logp if temperature == 1 else np.empty_like(logp)
    log_rest, entropy = np.empty(rows, np.float32), np.empty(rows, np.float32)
    summarise_rows(host_array(logits), temperature, ids, logp, source, log_rest, entropy)
    return ids, logp, source, log_rest, entropy


def _on_device(logits: Float[Tensor, "m V"], count: int, temperature: float) -> _Summary:
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
    if temperature != 1:
        parts.append((temper(top, temperature) - temper(logits, temperature).logsumexp(dim=-1, keepdim=True)).clamp_(min=_FLOOR))
    table = torch.cat(parts, dim=1).cpu().numpy()
    raw = np.ascontiguousarray(table[:, :count])
    source = raw if temperature == 1 else np.ascontiguousarray(table[:, count + 2 :])
    return ids.cpu().numpy(), raw, source, table[:, count], table[:, count + 1]


def host_array(logits: Float[Tensor, "m V"]) -> Float32[np.ndarray, "m V"]:
    """Return logits in the host's memory as compiled code takes them."""
    return np.ascontiguousarray(logits.detach().float().numpy())


@njit(cache=True, fastmath={"contract"})
@no_type_check
def exp_negative(x: np.float32) -> np.float32:
    """Return exp(x) of x <= 0, not below exp(-80), to float32 rounding; without a call, so that loops become vector code."""
    x = max(x, np.float32(_FLOOR))
    power = np.int32(x * np.float32(1.44269504) - np.float32(0.5))
    r = x - np.float32(power) * np.float32(0.693359375)  # ln 2 in two parts
    r = r + np.float32(power) * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    return p * np.int32((power + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(cache=True)
@no_type_check
def highest(values: np.ndarray) -> np.float32:
    """Return the maximum; of integers in the order of the floats, for their maximum becomes vector code."""
    high = np.int32(-(2**31))
    for v in range(len(values)):
        bits = np.float32(values[v]).view(np.int32)
        high = max(high, np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    return np.int32(high ^ ((high >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@njit(cache=True, fastmath={"reassoc", "contract", "nsz"})
@no_type_check
def _add_odds(values: np.ndarray, top: np.float32, scale: np.float32) -> tuple[np.float32, np.float32, np.float32]:
    """Return the sums of e = exp(scale * (value - top)) and of e * log e over values below the top, and the number of others."""
    total, weighted, tops = np.float32(0), np.float32(0), np.float32(0)
    for v in range(len(values)):
        gap = max((values[v] - top) * scale, np.float32(_FLOOR))
        odds = exp_negative(gap) if gap < 0 else np.float32(0)
        total += odds
        weighted += odds * gap
        tops += np.float32(0) if gap < 0 else np.float32(1)
    return total, weighted, tops


@njit(cache=True)
@no_type_check
def odds_of_others(values: np.ndarray, top: np.float32, scale: np.float32) -> tuple[float, float]:
    """Return the odds of all tokens but a most probable one against it (so each that ties counts 1), and the sum of odds * log(odds)."""
    total, weighted, tops = 0.0, 0.0, -1.0
    for start in range(0, len(values), _SUM):
        part = _add_odds(values[start : start + _SUM], top, scale)
        total, weighted, tops = total + part[0], weighted + part[1], tops + part[2]
    return total + tops, weighted


@njit(cache=True)
@no_type_check
def _keep_best(values: np.ndarray, ids: np.ndarray, kept: np.ndarray) -> None:
    """Write the best tokens and their values, descending, the lower id first on ties."""
    count, most = 0, len(ids)
    for start in range(0, len(values), _CHUNK):
        end = min(start + _CHUNK, len(values))
        if count == most and highest(values[start:end]) <= kept[most - 1]:
            continue
        for v in range(start, end):
            if count == most and values[v] <= kept[most - 1]:
                continue
            at = min(count, most - 1)
            while at > 0 and values[v] > kept[at - 1]:
                kept[at], ids[at] = kept[at - 1], ids[at - 1]
                at -= 1
            kept[at], ids[at] = values[v], v
            count = min(count + 1, most)


@njit(cache=True)
@no_type_check
def summarise_rows(
    logits: np.ndarray,
    temperature: float,
    ids: np.ndarray,
    logp: np.ndarray,
    source: np.ndarray,
    log_rest: np.ndarray,
    entropy: np.ndarray,
) -> None:
    """Fill the summary of every row; `source` is left alone at temperature 1."""
    count = ids.shape[1]
    kept = np.empty(count, np.float32)
    for row in range(len(logits)):
        values = logits[row]
        _keep_best(values, ids[row], kept)
        rest, weighted = odds_of_others(values, kept[0], np.float32(1))
        log_top = -np.log1p(rest)
        log_rest[row] = np.log(rest) + log_top
        entropy[row] = -log_top - weighted / (1.0 + rest)
        for k in range(count):
            logp[row, k] = max(kept[k] - kept[0], np.float32(_FLOOR)) + log_top
        if temperature != 1.0:
            scale = np.float32(1.0 / temperature)
            total = odds_of_others(values, kept[0], scale)[0]
            for k in range(count):
                source[row, k] = max((kept[k] - kept[0]) * scale - np.log1p(total), _FLOOR)


def is_filtered(sampling: Sampling) -> bool:
    """Whether top-k or top-p keeps tokens from being drawn."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def _filtered(source: Float32[np.ndarray, "m K"], sampling: Sampling) -> Float32[np.ndarray, "m K"]:
    """Remove what top-k and top-p remove; the best token always stays."""
    if not is_filtered(sampling):
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
