"""The report as one HTML file: the data, and the script that draws it in the browser."""

import base64
import hashlib
import json
from html import escape
from pathlib import Path

from millrace.report.contents import JobReport

STATIC = Path(__file__).parent / "static"
"""Built from `web/` by `make web`."""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>A script inside this file draws the report. Allow scripts to see it.</noscript>
<div id="page"></div>
<script type="application/json" id="report">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def report_page(report: JobReport) -> str:
    """The whole file. The browser runs the one script, whose hash the file names, and opens no connection. Texts of
    users and models lie in a block of data that they cannot end."""
    script, style = ((STATIC / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    policy = (
        f"default-src 'none'; script-src '{_source(script)}'; style-src '{_source(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = escape(f"{report.job.name} · Millrace")
    return PAGE.format(policy=policy, title=title, style=style, data=_block(report), script=script)


def _source(text: str) -> str:
    """The hash by which a Content-Security-Policy allows a script or a style sheet."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _block(report: JobReport) -> str:
    """JSON in ASCII without `<`, `>` and `&`: nothing in it can end the block or begin a comment."""
    text = json.dumps(report.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
