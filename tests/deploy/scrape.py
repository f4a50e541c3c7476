"""Reads the services' pages as deploy/prometheus/prometheus.yml tells Prometheus to, and says which could be read."""

import httpx
import yaml

from tests.deploy.expressions import DEPLOY

COORDINATOR = "coordinator:7700"
"""The coordinator's address in the configuration."""
SCRAPE_S = 10.0


async def scraped(http: httpx.AsyncClient, coordinator: str) -> str:
    """The series `up` of every target, in Prometheus's text format. `coordinator`: its host:port here."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text().replace(COORDINATOR, coordinator))
    lines = ["# TYPE up gauge"]
    for job in config["scrape_configs"]:
        groups = list(job.get("static_configs", ()))
        for discovery in job.get("http_sd_configs", ()):
            groups += (await http.get(discovery["url"], timeout=SCRAPE_S)).raise_for_status().json()
        for group in groups:
            for target in group["targets"]:
                labels = {"job": job["job_name"], "instance": target, **group.get("labels", {})}
                told = ",".join(f'{name}="{value}"' for name, value in labels.items())
                lines.append(f"up{{{told}}} {int(await _up(http, target))}")
    return "\n".join(lines) + "\n"


async def _up(http: httpx.AsyncClient, target: str) -> bool:
    try:
        return (await http.get(f"http://{target}/metrics", timeout=SCRAPE_S)).is_success
    except httpx.HTTPError:
        return False
