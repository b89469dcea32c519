"""The text form of an unmask rule, as the command line and result files write it.

A rule is comma-separated parts: a preset (`standard`, `bfloat16`, `sdar`, `ltr`, `random`), a flag (`non-strict`) or `key=value`.
Knows nothing of commands.

Example: `parse_rule("threshold=0.9,non-strict")` and back: `describe(rule)`.
"""

import math
from typing import Any, cast, get_args

from spot_dlm.confidence import Confidence, Resolution
from spot_dlm.schedule import Kind, Schedule
from spot_dlm.transition import Source, UnmaskRule

ALLOWED = (
    "standard | bfloat16 | sdar | ltr | k=INT | threshold=X[,non-strict] | leftmost=X[,non-strict] | "
    f"confidence={'|'.join(get_args(Confidence))} | source={'|'.join(get_args(Source))} | "
    f"resolution={'|'.join(get_args(Resolution))} | schedule={'|'.join(get_args(Kind))}:STEPS | span=INT | "
    "late=ID+ID | suppress=ID+ID | random | order_temperature=X | arrival=STEPS | no-step-noise, joined by commas"
)
_FLAGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "bfloat16": {"resolution": "bfloat16"},
    "sdar": {"source": "filtered"},  # what SDAR's own decoder compares: the probability after temperature, top-k and top-p
    "ltr": {"select": "left_to_right"},
    "strict": {"strict": True},
    "non-strict": {"strict": False},
    "random": {"order_temperature": math.inf},
    "no-step-noise": {"noise_step": False},
}
_CHOICES = {"confidence": get_args(Confidence), "source": get_args(Source), "resolution": get_args(Resolution)}
_NUMBERS = {"k": "num_per_step", "span": "span"}
_IDS = {"late": "late_ids", "suppress": "suppressed_ids"}
_THRESHOLDS = {"threshold": "threshold", "leftmost": "leftmost_above"}


def parse_rule(text: str) -> UnmaskRule:
    """Return the rule that `text` describes.

    Raises:
        ValueError: quoting the part that is wrong and listing what is allowed.
    """
    chosen: dict[str, Any] = {}
    for part in (p.strip() for p in text.split(",")):
        for field, value in _fields(part, text).items():
            if field in chosen and chosen[field] != value:
                raise ValueError(f"rule={text!r}: {part!r} contradicts an earlier part ({field}={chosen[field]})")
            chosen[field] = value
    if "strict" in chosen and "threshold" not in chosen:
        raise ValueError(f"rule={text!r}: strict and non-strict need threshold=X or leftmost=X")
    try:
        return UnmaskRule(**chosen)
    except ValueError as error:
        raise ValueError(f"rule={text!r}: {error}") from error


def _fields(part: str, text: str) -> dict[str, Any]:
    """Return the fields of UnmaskRule that one part sets."""
    if part in _FLAGS:
        return _FLAGS[part]
    key, equals, value = (p.strip() for p in part.partition("="))
    if equals and key in _THRESHOLDS:
        return {"select": _THRESHOLDS[key], "threshold": _number(value, part, text)}
    if equals and key == "order_temperature":
        return {key: _number(value, part, text)}
    if equals and key == "arrival":
        return {"select": "arrival", "schedule": Schedule("timesteps", _whole(value, part, text))}
    if equals and key in _NUMBERS:
        return {_NUMBERS[key]: _whole(value, part, text)}
    if equals and key in _IDS:
        return {_IDS[key]: tuple(_whole(number, part, text) for number in value.split("+"))}
    if equals and key == "schedule":
        kind, _, steps = value.partition(":")
        if kind not in get_args(Kind):
            raise ValueError(f"rule={text!r}: {part!r} is unknown; schedule is KIND:STEPS, KIND one of {', '.join(get_args(Kind))}")
        return {"schedule": Schedule(cast(Kind, kind), _whole(steps, part, text))}
    if equals and key in _CHOICES:
        if value not in _CHOICES[key]:
            raise ValueError(f"rule={text!r}: {part!r} is unknown; {key} is one of {', '.join(_CHOICES[key])}")
        return {key: value}
    raise ValueError(f"rule={text!r}: {part!r} is unknown; allowed: {ALLOWED}")


def _whole(value: str, part: str, text: str) -> int:
    number = _number(value, part, text)
    if number != int(number):
        raise ValueError(f"rule={text!r}: {part!r} needs a whole number")
    return int(number)


def _number(value: str, part: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"rule={text!r}: {part!r} needs a number") from None
    if not math.isfinite(number):
        raise ValueError(f"rule={text!r}: {part!r} needs a finite number")
    return number


def describe(rule: UnmaskRule) -> str:
    """Return the shortest text that `parse_rule` turns into a rule of the same behaviour (fields without effect are left out)."""
    parts = []
    if rule.select == "left_to_right":
        parts.append("ltr")
    for key, select in _THRESHOLDS.items():
        if rule.select == select:
            parts.append(f"{key}={rule.threshold!r}")
            parts += [] if rule.strict else ["non-strict"]
    if rule.num_per_step > 1:
        parts.append(f"k={rule.num_per_step}")
    if rule.select == "arrival" and rule.schedule is not None:
        parts.append(f"arrival={rule.schedule.steps}")
    elif rule.schedule is not None:
        parts.append(f"schedule={rule.schedule.kind}:{rule.schedule.steps}")
    if rule.span:
        parts.append(f"span={rule.span}")
    for key, field in _IDS.items():
        if getattr(rule, field):
            parts.append(f"{key}=" + "+".join(map(str, getattr(rule, field))))
    default = UnmaskRule()
    parts += [f"{k}={getattr(rule, k)}" for k in ("confidence", "source") if getattr(rule, k) != getattr(default, k)]
    if rule.resolution == "bfloat16":
        parts.append("bfloat16")
    if rule.order_temperature:
        parts.append("random" if math.isinf(rule.order_temperature) else f"order_temperature={rule.order_temperature!r}")
    if not rule.noise_step:
        parts.append("no-step-noise")
    return ",".join(parts) or "standard"
