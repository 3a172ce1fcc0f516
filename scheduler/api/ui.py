"""The page at `/ui`: a few static files that show the metrics and try a prompt, all from this service."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from fastapi.responses import Response

_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_PATHS = {
    "/ui": "index.html",
    **{
        f"/ui/{name}": name
        for name in ("page.css", "page.js", "figures.js", "format.js", "plots.js", "prompt.js", "icon.svg")
    },
}
UI_PATHS = tuple(_PATHS)
"""Hold nothing secret and need no API key: the page has a field for it."""
_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_ui_routes(app: FastAPI) -> None:
    """Serve the page and its files, from memory."""
    folder = files("scheduler.api") / "page"
    for path, name in _PATHS.items():
        _add_file(app, path, (folder / name).read_bytes(), _MEDIA_TYPES[name.rpartition(".")[2]])


def _add_file(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    @app.head(path, include_in_schema=False)
    @app.get(path, include_in_schema=False)
    async def send_file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)
