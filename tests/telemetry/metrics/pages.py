"""Pages of metrics, read as Prometheus reads them."""

import time
from collections.abc import Callable, Sequence

import httpx
from prometheus_client.parser import text_string_to_metric_families

WITHIN_S = 60.0


def page_with(port: int, wanted: Sequence[str] = (), holds: Callable[[str], bool] = bool) -> str:
    """The page that a service of this host serves at `port`, as soon as it has every text of `wanted` and `holds`
    is true of it."""
    until = time.monotonic() + WITHIN_S
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=WITHIN_S) as http:
        while True:
            page = http.get("/metrics").text
            missing = [text for text in wanted if text not in page]
            if not missing and holds(page):
                return page
            assert time.monotonic() < until, f"{missing or holds} is not in\n{page}"
            time.sleep(0.05)


def value(page: str, sample: str) -> float:
    """The value of a sample, written as the page has it."""
    (found,) = [line for line in page.splitlines() if line.rpartition(" ")[0] == sample]
    return float(found.rpartition(" ")[2])


def series(page: str) -> dict[str, set[str]]:
    """The names of a page's samples, each with the labels that it has."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found
