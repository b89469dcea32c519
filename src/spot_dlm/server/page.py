"""The page at `/`: fixed files that are shipped with the package, and headers that let them load nothing from elsewhere.

It is a client of the API like any other and needs no key itself. Example: `add_page(app)`.
"""

from functools import partial
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import Response

_FOLDER = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""Of every file: it may load and reach its own server alone, nobody may frame it, and text never becomes markup."""


def add_page(app: FastAPI) -> None:
    """Add the page's routes: `/`, and its files below `/page/`."""
    for file in sorted(_FOLDER.iterdir()):
        if file.suffix in _TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            answer = partial(_file, file.read_bytes(), f"{_TYPES[file.suffix]}; charset=utf-8")
            app.add_api_route(path, answer, methods=["GET", "HEAD"])


async def _file(content: bytes, media_type: str) -> Response:
    return Response(content, headers=HEADERS, media_type=media_type)
