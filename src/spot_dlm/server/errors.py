"""What a client is told when something is wrong: OpenAI's error shape, never a path or a stack trace.

Example: `ApiError(400, "temperature must be a number", param="temperature").body`.
"""

from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_LONGEST = 500


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: of HTTP.
        message: for the client.
        param: the field that is wrong.
        code: a word for programs.
        retry_after_s: seconds after which to try again, where that may help.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, _cut(message), param and _cut(param), code
        self.headers = {"retry-after": str(retry_after_s)} if retry_after_s else {}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    @property
    def body(self) -> dict[str, Any]:
        """The JSON document."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _cut(text: str) -> str:
    """Return a text that is short and can be encoded: it may quote what a client sent."""
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
    return text.encode("utf-8", "replace").decode("utf-8")
