"""Used by mkdocs.yml: puts on the site the pages that lie outside docs/ and the references that are made of the code,
and turns every link into one of the site.

The pages are written for a reader of the repository. Links to pages lead to them on the site as well; a link to another
file of the repository becomes its path as text, as the site does not have it.
"""

import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "BENCHMARKS.md": "project/benchmarks.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "presets/README.md": "project/presets.md",
    "recipes/README.md": "project/recipes.md",
}
"""Pages outside docs/, with their places on the site."""
GENERATED = {
    "rest.md": "interfaces.py",
    "client.md": "interfaces.py",
    "proto.md": "proto_page.py",
}
"""References that the site alone has, with the script in docs/ that makes each."""
SOURCES = {place: path for path, place in OUTSIDE.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]+)?\)")
FENCE = re.compile(r"^\s*```")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Anchors are those of GitHub, where the pages are read too."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slug}
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    for place, script in GENERATED.items():
        files.append(File.generated(config, place, content=made(place, script)))
    return files


def made(place: str, script: str) -> str:
    """The page at `place`, as PAGES of the script makes it."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / "docs" / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.PAGES[place]())


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    place = page.file.src_uri
    return rewritten(markdown, SOURCES.get(place, f"docs/{place}"), place)


def slug(heading: str, separator: str = "-") -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def rewritten(markdown: str, source: str, place: str) -> str:
    """The page with links of the site. `source`: its path in the repository; `place`: its path on the site."""

    def lead(found: re.Match[str]) -> str:
        image, label, link, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        there = OUTSIDE.get(target) or (target.removeprefix("docs/") if _on_site(target) else "")
        if there:
            relative = posixpath.relpath(there, posixpath.dirname(place) or ".")
            return f"{image}[{label}]({relative}{anchor or ''})"
        return label if target in label else f"{label} (`{target}`)"

    lines, fenced = [], False
    for line in markdown.split("\n"):
        fenced ^= bool(FENCE.match(line))
        lines.append(line if fenced else LINK.sub(lead, line))
    return "\n".join(lines)


def _on_site(path: str) -> bool:
    if path.removeprefix("docs/") in GENERATED:
        return True
    return path.startswith("docs/") and path.endswith((".md", ".svg", ".png")) and (ROOT / path).is_file()
