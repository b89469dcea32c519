"""Answers in OpenAI's shape: whole ones and the chunks of a stream. Knows nothing of connections.

Example: `Answer(job, settings.name, "spot-0.1.0").whole(["Hello."], [ended])`.
"""

import json
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from spot_dlm.server.errors import ApiError
from spot_dlm.server.jobs import Job
from spot_dlm.server.track import Ended

LAST = b"data: [DONE]\n\n"


def event(document: dict[str, Any]) -> bytes:
    """Return a document as a server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def failure(error: ApiError) -> bytes:
    """Return the event that ends a stream that cannot go on."""
    return event(error.body)


class Answer:
    """Makes the documents of one request.

    Args:
        job: the request.
        model: its name for clients.
        fingerprint: of the system, for clients.
    """

    def __init__(self, job: Job, model: str, fingerprint: str) -> None:
        self._job, self._is_chat = job, job.kind == "chat"
        self._head = {"id": ("chatcmpl-" if self._is_chat else "cmpl-") + uuid4().hex, "created": int(time.time()), "model": model}
        self._tail = {"system_fingerprint": fingerprint, "spot": {"seed": job.seed}}

    def whole(self, texts: Sequence[str], ended: Sequence[Ended]) -> dict[str, Any]:
        """Return the whole answer, a text and an end for every sample."""
        choices = [
            {"index": i, **self._content(text), "logprobs": None, "finish_reason": end.finish_reason} | _order(end)
            for i, (text, end) in enumerate(zip(texts, ended, strict=True))
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": self._usage(ended)} | self._tail

    def begin(self) -> list[bytes]:
        """Return the events that open a stream: who speaks, in every choice of a chat."""
        samples = range(len(self._job.samples)) if self._is_chat else ()
        return [self._chunk(i, {"delta": {"role": "assistant", "content": ""}}) for i in samples]

    def text(self, index: int, text: str) -> bytes:
        """Return the event of more text."""
        return self._chunk(index, {"delta": {"content": text}} if self._is_chat else {"text": text})

    def seen(self, index: int, document: dict[str, Any]) -> bytes:
        """Return the event of what shows how a sample is decoded."""
        return self._chunk(index, self._nothing, None, {"spot": document})

    def end(self, index: int, ended: Ended) -> bytes:
        """Return the event of a sample's end."""
        return self._chunk(index, self._nothing, ended.finish_reason, _order(ended))

    def close(self, ended: Sequence[Ended]) -> list[bytes]:
        """Return the events that close a stream: what was used, where it is asked for, and the mark of the end."""
        usage = {"choices": [], "usage": self._usage(ended)}
        return ([event(self._chunk_head | usage | self._tail)] if self._job.include_usage else []) + [LAST]

    @property
    def _nothing(self) -> dict[str, Any]:
        return {"delta": {}} if self._is_chat else {"text": ""}

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return self._head | {"object": "chat.completion.chunk" if self._is_chat else "text_completion"}

    def _chunk(self, index: int, content: dict[str, Any], reason: str | None = None, more: dict[str, Any] | None = None) -> bytes:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": reason} | (more or {})
        usage = {"usage": None} if self._job.include_usage else {}
        return event(self._chunk_head | {"choices": [choice]} | usage | self._tail)

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}} if self._is_chat else {"text": text}

    def _usage(self, ended: Sequence[Ended]) -> dict[str, int]:
        given, made = self._job.num_prompt_tokens, sum(end.num_tokens for end in ended)
        return {"prompt_tokens": given, "completion_tokens": made, "total_tokens": given + made}


def _order(ended: Ended) -> dict[str, Any]:
    """Return the extension of a choice: ids and, for each, the number of the step that committed it."""
    if ended.token_ids is None:
        return {}
    return {"spot": {"token_ids": ended.token_ids, "commit_steps": ended.commit_steps}}
