"""Names of the drafters, as the command line and results write them."""

from collections.abc import Callable

from spot_dlm.drafters.chain import Chain
from spot_dlm.drafters.left_to_right import LeftToRight
from spot_dlm.drafters.root import Root
from spot_dlm.interfaces import Drafter

DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "root": Root,
    "chain": Chain,
    "chain-published": lambda: Chain(coupled=False),
    "ltr": LeftToRight,
}


def build_drafter(name: str) -> Drafter:
    """Build a drafter by name.

    Raises:
        ValueError: naming the known drafters.
    """
    if name not in DRAFTERS:
        raise ValueError(f"drafter={name!r} is unknown; choose one of {', '.join(DRAFTERS)}")
    return DRAFTERS[name]()
