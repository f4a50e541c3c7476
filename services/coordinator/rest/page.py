"""The page for people. Its sources are in web/; `make web` builds it into static/."""

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
PAGE = STATIC / "index.html"


def add(app: FastAPI) -> None:
    """Adds the page to `app`. Its files hold no data: the page asks the API for that, with the token."""
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE, media_type="text/html", headers={"Cache-Control": "no-cache"})
