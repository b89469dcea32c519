"""Packed passes: the canvases of any number of queries as one row of tokens, cut into segments; the contract of `forward`.

A segment is one block of tokens that see each other. An incomplete canvas is one segment. A complete canvas C is two: C itself, and
an all-mask block M one block later that sees C too. Segments of one query that are attended alike are neighbours and form a group:

    query 1: [incomplete canvases..., complete canvases...] [their M...]   query 2: [...] [...]   padding

Equal canvases of one query are one segment. Knows nothing of weights. Example: `pack(pieces, mask_token_id).padded(16, 16)`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64
from torch import Tensor

from spot_dlm.state import MASKED
from spot_dlm.targets.prefix_cache import PrefixCache

Piece = tuple[PrefixCache, Int64[np.ndarray, "_ _"]]
"""A prefix and canvases on it: a query, or the part of one that fits into a pass."""


@dataclass(frozen=True)
class Group:
    """`count` segments of `length` tokens from packed token `start` on; each sees the cache, its context and itself.

    Args:
        cache: keys and values that every segment sees; read only.
        start: first packed token.
        count: number of segments; the first ones are decoded, the last `kept` ones are only for their keys and values.
        length: tokens of a segment.
        kept: number of segments whose keys and values the pass returns.
        context: packed token at which the context segments begin, one for each segment; None: no context.
        visible: which tokens of a segment see which (True = sees); None: all see all.
        also_decoded: whether hidden states of kept segments are wanted too.
    """

    cache: PrefixCache
    start: int
    count: int
    length: int
    kept: int = 0
    context: int | None = None
    visible: Bool[Tensor, "L L"] | None = None
    also_decoded: bool = False

    @property
    def decoded(self) -> int:
        """Number of segments that are not only for their keys and values."""
        return self.count - self.kept


@dataclass(frozen=True)
class Packed:
    """One pass: tokens with their absolute positions, the groups they form and the tokens whose hidden states are wanted."""

    ids: Int64[np.ndarray, " T"]
    positions: Int64[np.ndarray, " T"]
    wanted: Int64[np.ndarray, " R"]
    groups: list[Group]
    rows: int = 1
    """Segments that an attention works on at least (strict mode)."""

    def padded(self, tokens: int, wanted: int) -> "Packed":
        """Return the pass with at least so many tokens and wanted ones, the added ones in no group."""
        more, repeated = max(0, tokens - len(self.ids)), max(0, wanted - len(self.wanted)) if len(self.wanted) else 0
        nothing = np.zeros(more, dtype=np.int64)
        ids, positions = (np.concatenate((a, nothing)) if more else a for a in (self.ids, self.positions))
        rows = np.concatenate((self.wanted, np.repeat(self.wanted[:1], repeated))) if repeated else self.wanted
        return Packed(ids, positions, rows, self.groups, self.rows)


def pack(pieces: Sequence[Piece], mask_token_id: int, rows: int = 1, shifted: bool = False) -> Packed:
    """Lay out the segments of all pieces; wanted are the masked positions of every canvas, in order (of a complete one: all of M).

    `shifted` wants the positions before them, of a block's first position itself.
    """
    ids, positions, wanted, groups, start = [], [], [], [], 0
    for cache, canvases in pieces:
        length = canvases.shape[1]
        layout = _Layout.of(canvases)
        first, pairs, steps = len(layout.segments), layout.complete, np.arange(length)
        ids.append(np.where(layout.segments == MASKED, mask_token_id, layout.segments).ravel())
        positions.append(np.tile(cache.length + steps, first))
        if pairs:
            ids.append(np.full(pairs * length, mask_token_id))
            positions.append(np.tile(cache.length + length + steps, pairs))
        tokens = start + layout.decoded_by[:, None] * length + (np.maximum(steps - 1, 0) if shifted else steps)
        wanted.append(tokens[layout.masked])
        groups.append(Group(cache, start, first, length, kept=pairs))
        if pairs:
            end = start + first * length
            groups.append(Group(cache, end, pairs, length, context=end - pairs * length))
        start += (first + pairs) * length
    return Packed(np.concatenate(ids), np.concatenate(positions), np.concatenate(wanted), groups, rows)


@dataclass(frozen=True)
class _Layout:
    """Distinct canvases, incomplete ones first, and for every canvas the segment that decodes it and its positions that are decoded."""

    segments: Int64[np.ndarray, "n L"]
    complete: int
    decoded_by: Int64[np.ndarray, " N"]
    masked: Bool[np.ndarray, "N L"]

    @classmethod
    def of(cls, canvases: Int64[np.ndarray, "N L"]) -> "_Layout":
        masked = canvases == MASKED
        whole = ~masked.any(axis=1)
        first: dict[bytes, int] = {}
        names = [canvas.tobytes() for canvas in canvases]
        order = np.argsort(whole, kind="stable").tolist() if whole.any() else range(len(canvases))
        kept = [i for i in order if first.setdefault(names[i], i) == i]
        place = {names[i]: at for at, i in enumerate(kept)}
        complete = int(whole[kept].sum())
        segment = np.array([place[name] for name in names], dtype=np.int64)
        return cls(canvases[kept], complete, segment + complete * whole, masked | whole[:, None])


def chunks(pieces: Sequence[Piece], most_tokens: int, most_scores: int, rows: int = 1) -> Iterator[list[Piece]]:
    """Cut queries into passes of whole canvases, in order: at most so many tokens and so many query-key pairs, one canvas at least.

    In strict mode (rows > 1) no pass holds canvases of two queries: their number would change the pass's shape.
    """
    made: list[Piece] = []
    tokens = scores = 0
    for cache, canvases in pieces:
        start, length = 0, canvases.shape[1]
        if made and rows > 1:
            yield made
            made, tokens, scores = [], 0, 0
        for at, doubled in enumerate((canvases != MASKED).all(axis=1).tolist()):
            size = length * (1 + doubled)
            pairs = size * (cache.length + size)
            if tokens and (tokens + size > most_tokens or scores + pairs > most_scores):
                yield [*made, (cache, canvases[start:at])] if at > start else made
                made, start, tokens, scores = [], at, 0, 0
            tokens, scores = tokens + size, scores + pairs
        made.append((cache, canvases[start:]))
    if made:
        yield made
