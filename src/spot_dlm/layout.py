"""Where the blocks of a decoded sequence lie: on a grid from position 0, from the end of the prompt on, or one block for everything.

Knows nothing of states and passes. Example: `Layout.of(spec, 5, DecodeParams(max_new_tokens=8, block_length=4)).span(1)` is `(4, 8)`.
"""

from dataclasses import dataclass

from spot_dlm.interfaces import DecodeParams, TargetSpec


@dataclass(frozen=True)
class Layout:
    """Blocks of `length` tokens from absolute position `first` on, which is where block `index` begins; the last one ends at `end`."""

    first: int
    index: int
    length: int
    end: int

    @classmethod
    def of(cls, spec: TargetSpec, num_prompt: int, params: DecodeParams) -> "Layout":
        """Return the layout of a prompt of so many tokens and what is decoded after it."""
        end = num_prompt + params.max_new_tokens
        if spec.blocks == "grid":
            length = params.block_length or spec.block_length
            index = num_prompt // length
            return cls(index * length, index, length, end if spec.cuts_last_block else -(-end // length) * length)
        whole = spec.blocks == "whole"
        return cls(num_prompt, 0, params.block_length or (params.max_new_tokens if whole else spec.block_length), end)

    @property
    def last(self) -> int:
        """Number of the last block."""
        return self.index + (self.end - self.first - 1) // self.length

    def span(self, block: int) -> tuple[int, int]:
        """Return where a block begins and ends."""
        start = self.first + (block - self.index) * self.length
        return start, min(start + self.length, self.end)
