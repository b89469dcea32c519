"""Bodies of requests: JSON to checked values; a field that is unknown, or known and not offered, is refused by its name.

Knows nothing of models. Example: `read_chat(b'{"model": "shipped", "messages": [{"role": "user", "content": "Hi"}]}').messages`.
"""

import json
import re
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spot_dlm.server.errors import ApiError

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
_NOTHING: dict[str, Any] = {}
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "best_of": (1,), "echo": (False,), "frequency_penalty": (0, 0.0), "function_call": ("none",), "functions": (),
    "logit_bias": (_NOTHING,), "logprobs": (False, 0), "top_logprobs": (0,), "modalities": (["text"],),
    "parallel_tool_calls": (True, False), "prediction": (), "presence_penalty": (0, 0.0), "reasoning_effort": (),
    "response_format": ({"type": "text"},), "store": (False,), "suffix": ("",), "tool_choice": ("none", "auto"), "tools": ([],),
    "verbosity": (), "web_search_options": (),
}  # fmt: skip
"""OpenAI's fields that are not offered, each with the values that ask for nothing; null does too."""
_WHY = {"logprobs": "tokens are committed in any order, so there are no probabilities given the tokens before"}
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MESSAGES = {"extra_forbidden": "unknown field", "missing": "is required"}


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Extensions(_Strict):
    """The field `spot`: what is not OpenAI's."""

    drafter: str | None = None
    nodes: Any = None
    rule: str | None = Field(default=None, max_length=500)
    sampler: str | None = Field(default=None, max_length=500)
    top_k: int | None = Field(default=None, ge=0, le=2**31)
    return_order: bool | None = None
    return_passes: bool | None = None


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Message(_Strict):
    """A turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Any


class Asked(_Strict):
    """What both kinds of requests may say."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=2**31)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=2**31)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    spot: Extensions | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings.

        Raises:
            ApiError: if they are no texts, empty, too many or too long.
        """
        stops = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise ApiError(400, "stop: must be a text or a list of texts", "stop")
        if len(stops) > MAX_STOPS:
            raise ApiError(400, f"stop: at most {MAX_STOPS} texts, got {len(stops)}", "stop")
        if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise ApiError(400, f"stop: a text must have 1 to {MAX_STOP_CHARACTERS} characters", "stop")
        return stops

    @property
    def own(self) -> Extensions:
        """The field `spot`, empty where it is left out."""
        return self.spot or Extensions()


class ChatAsked(Asked):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31)

    @property
    def conversation(self) -> list[dict[str, str]]:
        """The turns, each with its role and one text.

        Raises:
            ApiError: if a content is no text, or all are empty.
        """
        turns = [{"role": m.role, "content": _text_of(m.content, f"messages.{i}.content")} for i, m in enumerate(self.messages)]
        if not any(turn["content"].strip() for turn in turns):
            raise ApiError(400, "messages: there is no text in them", "messages")
        return turns


class CompletionAsked(Asked):
    """The body of /v1/completions."""

    prompt: Any

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts: texts or token ids.

        Raises:
            ApiError: if they are something else, or empty.
        """
        prompt = self.prompt
        if isinstance(prompt, str) or _is_ids(prompt):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt or not (all(isinstance(p, str) for p in prompt) or all(_is_ids(p) for p in prompt)):
            raise ApiError(400, "prompt: must be a text, a list of texts, a list of token ids or a list of such lists", "prompt")
        if not all(p.strip() if isinstance(p, str) else p for p in prompt):
            raise ApiError(400, "prompt: is empty", "prompt")
        return prompt


Body = TypeVar("Body", bound=Asked)


def read_chat(body: bytes) -> ChatAsked:
    """Return the checked body of a chat request.

    Raises:
        ApiError: 400, naming what is wrong.
    """
    asked = _checked(ChatAsked, body)
    if asked.max_completion_tokens is not None:
        if asked.max_tokens not in (None, asked.max_completion_tokens):
            raise ApiError(400, "max_completion_tokens: max_tokens says another number; give one of them", "max_completion_tokens")
        asked.max_tokens = asked.max_completion_tokens
    return asked


def read_completion(body: bytes) -> CompletionAsked:
    """Return the checked body of a completion request.

    Raises:
        ApiError: 400, naming what is wrong.
    """
    return _checked(CompletionAsked, body)


def _checked(kind: type[Body], body: bytes) -> Body:
    document = _object(body)
    for field in sorted(document.keys() & UNSUPPORTED.keys()):
        value = document.pop(field)
        if value is not None and not any(type(value) is type(idle) and value == idle for idle in UNSUPPORTED[field]):
            reason = _WHY.get(field)
            raise ApiError(400, f"{field}: not supported by this server" + (f" ({reason})" if reason else ""), field, "unsupported_field")
    try:
        asked = kind.model_validate(document)
    except ValidationError as error:
        raise _refusal(error) from None
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "stream_options: only with stream", "stream_options")
    if asked.own.return_passes and not asked.stream:
        raise ApiError(400, "spot.return_passes: only with stream", "spot.return_passes")
    return asked


def _object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object of plain numbers and of texts that can be encoded."""
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_no_number)
        if _SURROGATE.search(body):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise ApiError(400, "the body is no valid UTF-8") from None
    except UnicodeEncodeError:
        raise ApiError(400, "the body holds half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ApiError(400, f"the body is no valid JSON{where}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    return document


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")


def _refusal(error: ValidationError) -> ApiError:
    """Return what is wrong first; nothing of the value is quoted."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    what = _MESSAGES.get(first["type"], first["msg"])
    return ApiError(400, f"{what}: {field}" if first["type"] == "extra_forbidden" else f"{field}: {what}", field)


def _text_of(content: Any, field: str) -> str:
    if isinstance(content, str):
        return content
    texts = [_part(part) for part in content] if isinstance(content, list) else [None]
    if any(text is None for text in texts):
        raise ApiError(400, f"{field}: must be a text or a list of text parts", field)
    return "".join(text for text in texts if text is not None)


def _part(part: Any) -> str | None:
    """Return the text of a part; None for anything else."""
    if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text" or not isinstance(part["text"], str):
        return None
    return part["text"]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
