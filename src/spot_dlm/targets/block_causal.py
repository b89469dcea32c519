"""The adapter for block-causal targets with same-position logits (SDAR, TraDo and the shipped model).

Blocks count from absolute position 0; a row sees the cached complete blocks and itself. `evaluate` reads the cache, only `prefill`
and `commit` write it. Source of the contract: SDAR's generate.py and modeling_sdar.py (docs/families.md).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from spot_dlm.interfaces import MaskedLogits, Prefix, TargetSpec
from spot_dlm.state import MASKED
from spot_dlm.targets.prefix_attention import PrefixCache
from spot_dlm.targets.text import TextCodec

_PREFILL_TOKENS = 512
_MIN_TOKENS_PER_THREAD = 8  # matrix products with fewer rows per thread round differently from larger ones


class BlockCausalTarget:
    """A Qwen3-like host with block-causal attention.

    Args:
        model: the native transformers model, its attention implementation set to `prefix_attention.NAME`.
        spec: sizes and special ids.
        codec: text in and out; None for a checkpoint without tokenizer (token ids only).
        padded_rows: evaluate every pass at this many rows at least, so that standard and speculative decoding run the same
            kernels on devices whose rounding depends on the shape (strict mode, method.md section 9d).
    """

    def __init__(self, model: Any, spec: TargetSpec, codec: TextCodec | None, padded_rows: int = 1) -> None:
        self._model, self._spec, self._codec, self._padded_rows = model, spec, codec, padded_rows
        defined = set(range(spec.vocab_size)) if codec is None else codec.defined_ids
        excluded = sorted({spec.mask_token_id} | (set(range(spec.vocab_size)) - defined))
        self._excluded = torch.tensor(excluded, device=spec.device)
        self._all_visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=spec.device)

    @property
    def spec(self) -> TargetSpec:
        """Sizes and special ids."""
        return self._spec

    def encode(self, text: str) -> list[int]:
        """Return the prompt ids of user text (see TextCodec).

        Raises:
            ValueError: if the text is empty or the checkpoint has no tokenizer.
        """
        if self._codec is None:
            raise ValueError(f"{self._spec.name} has no tokenizer files; give token ids or add tokenizer.json")
        return self._codec.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids; empty for a checkpoint without tokenizer."""
        return "" if self._codec is None else self._codec.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        """Return the literal text of one id, special or not; empty where the tokenizer has none."""
        return "" if self._codec is None else self._codec.token_text(token_id)

    @property
    def sizes(self) -> dict[str, int]:
        """Layers, hidden and feed-forward size, query and key/value heads of the host."""
        config = self._model.config
        return {
            "layers": config.num_hidden_layers,
            "hidden": config.hidden_size,
            "intermediate": config.intermediate_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
        }

    @torch.inference_mode()
    def prefill(self, token_ids: Int64[np.ndarray, " P"], block_length: int) -> PrefixCache:
        """Cache complete prompt blocks, in chunks of whole blocks under a block-causal mask."""
        if len(token_ids) % block_length:
            raise ValueError(f"prefill takes whole blocks of {block_length}, got {len(token_ids)} tokens")
        prefix = PrefixCache(block_length)
        chunk = max(1, _PREFILL_TOKENS // block_length) * block_length
        for start in range(0, len(token_ids), chunk):
            ids = token_ids[start : start + chunk]
            blocks = np.arange(start, start + len(ids)) // block_length
            visible = np.arange(start + len(ids)) // block_length <= blocks[:, None]
            self._write(prefix, ids, torch.from_numpy(visible)[None, None].to(self._spec.device))
        return prefix

    @torch.inference_mode()
    def commit(self, prefix: Prefix, token_ids: Int64[np.ndarray, " L"]) -> None:
        """Append one complete block to the cache."""
        self._write(_own(prefix), token_ids, self._all_visible)

    @torch.inference_mode()
    def evaluate(self, prefix: Prefix, canvases: Int64[np.ndarray, "N L"]) -> MaskedLogits:
        """Return logits (float32) for the masked positions of N canvases; peak memory is that of their masked rows x V."""
        rows, length = canvases.shape
        masked = canvases == MASKED
        ids = np.where(masked, self._spec.mask_token_id, canvases)
        padded = max(rows, self._padded_rows, -(-self._min_tokens // length))
        if padded > rows:
            ids = np.concatenate((ids, np.repeat(ids[:1], padded - rows, axis=0)))
        hidden = self._hidden(_own(prefix), torch.from_numpy(ids), self._all_visible).flatten(0, 1)
        wanted = np.flatnonzero(masked.reshape(-1))
        count = len(wanted)
        least = self._padded_rows * length if self._padded_rows > 1 else self._min_tokens
        if count < least:
            wanted = np.concatenate((wanted, np.repeat(wanted[:1], least - count)))
        logits = self._model.lm_head(hidden[torch.from_numpy(wanted).to(hidden.device)])[:count].float()
        logits.index_fill_(1, self._excluded, -torch.inf)
        self._wait()
        return MaskedLogits(logits, [0, *np.cumsum(masked.sum(axis=1)).tolist()])

    @property
    def _min_tokens(self) -> int:
        return max(16, _MIN_TOKENS_PER_THREAD * torch.get_num_threads()) if self._spec.device.type == "cpu" else 1

    def _write(self, prefix: PrefixCache, token_ids: Int64[np.ndarray, " S"], visible: Tensor) -> None:
        written: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._hidden(prefix, torch.from_numpy(token_ids.copy())[None], visible, written)
        prefix.append(*written)
        self._wait()

    def _wait(self) -> None:
        """Wait for an accelerator's queue, so that the seconds of a pass are counted as the target's."""
        if self._spec.device.type == "cuda":
            torch.cuda.synchronize(self._spec.device)

    def _hidden(
        self, prefix: PrefixCache, ids: Tensor, visible: Tensor, written: tuple[list[Tensor], list[Tensor]] | None = None
    ) -> Tensor:
        positions = torch.arange(prefix.length, prefix.length + ids.shape[1], device=self._spec.device)[None]
        out = self._model.model(
            input_ids=ids.to(self._spec.device),
            attention_mask=visible,
            position_ids=positions,
            use_cache=False,
            prefix=prefix,
            written=written,
        )
        return out.last_hidden_state


def _own(prefix: Prefix) -> PrefixCache:
    """Narrow the loop's prefix to the cache that `prefill` made."""
    if not isinstance(prefix, PrefixCache):
        raise TypeError(f"the prefix must come from this target's prefill, got {type(prefix).__name__}")
    return prefix
