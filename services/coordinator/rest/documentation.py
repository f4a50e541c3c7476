"""/docs: the OpenAPI document as a page to read and to try out. Nothing of it comes from the internet."""

from importlib.util import find_spec
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

from millrace.errors import Unavailable
from millrace.extras import how_to_install

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
