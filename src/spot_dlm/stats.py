"""Counts of a decoding run, kept as integers and seconds that add up; ratios are derived when printed (method.md section 10)."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Counts:
    """Passes, nodes, transitions and seconds of one or many decoded sequences; `a + b` adds every field.

    `rows` are those of all passes (a complete block in a graph takes two), `blocks` the blocks that were finished, `idle` passes of the
    official loop that commit nothing and are not made. `reached[d]` counts
    passes whose walk arrived at depth d, `offered[d]` those whose graph had a node there.
    """

    nfe: int = 0
    nfe_prefill: int = 0
    nfe_commit: int = 0
    rows: int = 0
    blocks: int = 0
    idle: int = 0
    transitions: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    sequences: int = 0
    total_s: float = 0.0
    target_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    offered: list[int] = field(default_factory=list)
    reached: list[int] = field(default_factory=list)

    @property
    def tpf(self) -> float:
        """Tokens up to and including the first end token, per decoding pass."""
        return self.tokens / self.nfe if self.nfe else 0.0

    @property
    def acceptance_length(self) -> float:
        """Transitions per decoding pass (at least 1; the bonus step included)."""
        return self.transitions / self.nfe if self.nfe else 0.0

    @property
    def host_share(self) -> float:
        """Share of the time outside the target's passes: noise, transition, drafting, walk."""
        return 1 - self.target_s / self.total_s if self.total_s else 0.0

    @property
    def nfe_official(self) -> int:
        """Passes of a decoder that commits one state per pass and spends one more to cache each block, as official code does."""
        return self.transitions + self.blocks

    def add_seconds(self, draft_s: float, target_s: float, verify_s: float) -> None:
        """Add one pass's seconds by what they were spent on."""
        self.draft_s += draft_s
        self.target_s += target_s
        self.verify_s += verify_s

    def count_pass(self, depths: list[int], accepted: int, rows: int) -> None:
        """Count one decoding pass of so many rows, with nodes at `depths` (without the root), whose walk accepted `accepted`."""
        self.nfe += 1
        self.rows += rows
        self.drafted += len(depths)
        self.accepted += accepted
        self.transitions += accepted + 1
        deepest = max([*depths, accepted, 0])
        for counts in (self.offered, self.reached):
            counts.extend([0] * (deepest - len(counts)))
        for depth in set(depths):
            self.offered[depth - 1] += 1
        for depth in range(accepted):
            self.reached[depth] += 1

    def __add__(self, other: "Counts") -> "Counts":
        total = Counts()
        for item in fields(self):
            ours, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(ours, list):
                size = max(len(ours), len(theirs))
                padded = [values + [0] * (size - len(values)) for values in (ours, theirs)]
                setattr(total, item.name, [a + b for a, b in zip(*padded, strict=True)])
            else:
                setattr(total, item.name, ours + theirs)
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return every count and the derived ratios for JSON."""
        rows: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        return rows | {
            "nfe_official": self.nfe_official,
            "tpf": self.tpf,
            "acceptance_length": self.acceptance_length,
            "host_share": self.host_share,
        }
