"""The page at `/`: static files under a policy that lets them load and reach nothing but this server. Knows no models."""

from __future__ import annotations

import html
from functools import cache, partial
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import Response

from ..types import Reason

FILES = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

router = APIRouter(include_in_schema=False)


@cache
def _text(name: str) -> str:
    """A file of the page, with the reasons where they are wanted."""
    told = [(html.escape(reason), html.escape(reason.words)) for reason in Reason]
    rows = "".join(f'<div id="{reason}"><dt>{reason}</dt><dd>{words}</dd></div>\n' for reason, words in told)
    return (files(__package__) / "page" / name).read_text(encoding="utf-8").replace("<!-- reasons -->", rows)


async def _file(name: str, kind: str) -> Response:
    return Response(_text(name), media_type=kind, headers=HEADERS)


for _path, _about in FILES.items():
    router.add_api_route(_path, partial(_file, *_about), methods=["GET"])
