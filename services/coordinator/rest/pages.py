"""The page for people, and `/docs`: the OpenAPI document as a page to try out. Nothing comes from the internet."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response

from millrace.errors import Unavailable
from millrace.software import how_to_install

ASSETS = "/docs/assets"
PACKAGE = "fastapi_offline"
"""Holds a current Swagger UI."""


def add(app: FastAPI) -> None:
    """Adds the page to `app`. Without the package it answers how to install that."""
    package = find_spec(PACKAGE)
    locations = package.submodule_search_locations if package is not None else None
    if locations:
        app.mount(ASSETS, StaticFiles(directory=Path(locations[0]) / "static"))

    @app.get("/docs", include_in_schema=False)
    async def page() -> HTMLResponse:
        if not locations:
            raise Unavailable("the package fastapi-offline is not installed.", f"{how_to_install('coordinator')}.")
        return get_swagger_ui_html(
            openapi_url=app.openapi_url or "",
            title=app.title,
            swagger_js_url=f"{ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{ASSETS}/favicon.png",
        )


STATIC = Path(__file__).parent / "static"
PAGE = STATIC / "index.html"
REVALIDATED = {"Cache-Control": "no-cache"}
"""A browser asks each time whether a file has changed: after an upgrade all files of the page are of one release."""
ONLY_OWN = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}
"""The browser loads and runs nothing that the coordinator does not serve, and no other page can frame this one."""


class RevalidatedFiles(StaticFiles):
    """Files that a browser does not take from its cache without asking."""

    def file_response(self, *arguments: Any, **named: Any) -> Response:
        response = super().file_response(*arguments, **named)
        response.headers.update(REVALIDATED)
        return response


def add_page(app: FastAPI) -> None:
    """Adds the page to `app`. Its files hold no data: the page asks the API for that, with the token."""
    app.mount("/static", RevalidatedFiles(directory=STATIC))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html", headers=REVALIDATED | ONLY_OWN)
