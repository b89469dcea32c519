"""What an operator decides: limits, and the parameters of requests that do not say them.

Example: `Settings(name="shipped", max_requests=4)`.
"""

from dataclasses import dataclass
from typing import Literal

from spot_dlm.batch import MAX_CACHED_TOKENS, MAX_REQUESTS
from spot_dlm.budget import MOST_NODES
from spot_dlm.interfaces import DecodeParams


@dataclass(frozen=True)
class Defaults:
    """Parameters of requests that do not say them; a sampler stands for the rule, and for the temperature where that is None."""

    max_tokens: int = DecodeParams().max_new_tokens
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    nodes: int | Literal["auto"] = "auto"
    rule: str = "standard"
    sampler: str | None = None
    block_length: int | None = None


@dataclass(frozen=True)
class Settings:
    """Limits of a server.

    Args:
        name: of the model, for clients.
        max_requests: samples in one pass.
        queue: samples that wait at most; further requests get a 429.
        max_cached_tokens: see `Batch`.
        max_samples: samples of one request (prompts times n).
        max_nodes: nodes that a request may ask for.
        needs_fixed_nodes: whether nodes="auto" is refused (strict mode).
        max_body_bytes: of a request.
        timeout_s: seconds from a request to its whole answer.
        grace_s: seconds that running requests have when the server is told to end.
        api_key: what clients must show; empty: nothing.
        defaults: parameters of requests that do not say them.

    Raises:
        ValueError: naming the field and what is allowed.
    """

    name: str
    max_requests: int = MAX_REQUESTS
    queue: int = 64
    max_cached_tokens: int = MAX_CACHED_TOKENS
    max_samples: int = 16
    max_nodes: int = MOST_NODES
    needs_fixed_nodes: bool = False
    max_body_bytes: int = 2**20
    timeout_s: float = 600.0
    grace_s: float = 30.0
    api_key: str = ""
    defaults: Defaults = Defaults()

    def __post_init__(self) -> None:
        for field in ("max_requests", "max_cached_tokens", "max_samples", "max_nodes", "max_body_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.queue < 0:
            raise ValueError(f"queue={self.queue} must be at least 0")
        if not 0 < self.timeout_s < 1e6 or not 0 <= self.grace_s < 1e6:
            raise ValueError(f"timeout_s={self.timeout_s} must be above 0 and grace_s={self.grace_s} at least 0, both below a million")

    @property
    def capacity(self) -> int:
        """Samples that run or wait at most."""
        return self.max_requests + self.queue
