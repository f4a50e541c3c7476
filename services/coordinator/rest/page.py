"""The page for people. Its sources are in web/; `make web` builds it into static/."""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
PAGE = STATIC / "index.html"
REVALIDATED = {"Cache-Control": "no-cache"}
"""A browser asks each time whether a file has changed: after an upgrade all files of the page are of one release."""
ONLY_OWN = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""The browser loads and runs nothing that the coordinator does not serve, and no other page can frame this one."""


class RevalidatedFiles(StaticFiles):
    """Files that a browser does not take from its cache without asking."""

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        response = super().file_response(*arguments, **named)
        response.headers.update(REVALIDATED)
        return response


def add(app: FastAPI) -> None:
    """Adds the page to `app`. Its files hold no data: the page asks the API for that, with the token."""
    app.mount("/static", RevalidatedFiles(directory=STATIC))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html", headers=REVALIDATED | ONLY_OWN)
