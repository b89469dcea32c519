"""The checkpoint of a training run: everything that decides what follows, and the identity of the run that it belongs to.

Knows nothing of losses and traces. Example: `interrupted_run(Path("drafter"))` is (steps done, the run's parameters) or None.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spot_dlm.order_model import OrderModel


def copy_weights(model: OrderModel) -> dict[str, Tensor]:
    """Return the model's weights as they are now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def resume(
    checkpoint: Path, identity: dict[str, Any], model: OrderModel, optimizers: list[torch.optim.Optimizer]
) -> tuple[int, list[dict[str, float]], dict[str, Tensor], float]:
    """Load model and optimizers; return the steps done, the evaluations, the best weights and the seconds spent.

    Raises:
        ValueError: if the file is damaged or belongs to a run with another identity.
    """
    state, found = _read(checkpoint)
    different = [k for k in identity if json.dumps(found.get(k)) != json.dumps(identity[k])]
    if different:
        names = [f"{k} ({_changed(found.get(k), identity[k])})" if isinstance(identity[k], dict) else k for k in different]
        raise ValueError(f"{checkpoint}: belongs to a run with other {' and '.join(names)}; give another --out or delete it")
    try:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return int(state["step"]), list(state["history"]), dict(state["best"]), float(state["seconds"])
    except (KeyError, RuntimeError, ValueError) as error:
        raise _damaged(checkpoint, error) from error


def interrupted_run(out: Path) -> tuple[int, dict[str, Any]] | None:
    """Return the steps done and the TrainParams of the run in a drafter's folder, None where there is no checkpoint.

    Raises:
        ValueError: if the checkpoint is damaged.
    """
    checkpoint = out / "checkpoint.pt"
    if not checkpoint.exists():
        return None
    state, identity = _read(checkpoint)
    return int(state["step"]), dict(identity["params"])


def _read(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        return state, dict(json.loads(state["identity"]))
    except PermissionError:
        raise
    except Exception as error:
        raise _damaged(checkpoint, error) from error


def _damaged(checkpoint: Path, error: Exception) -> ValueError:
    return ValueError(f"{checkpoint}: damaged ({type(error).__name__}); delete it to start again")


def _changed(found: dict[str, Any] | None, wanted: dict[str, Any]) -> str:
    found = found or {}
    return ", ".join(f"{k}={found.get(k)!r} there, {wanted.get(k)!r} here" for k in {**found, **wanted} if found.get(k) != wanted.get(k))
