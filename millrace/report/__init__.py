"""The report of a job: one HTML file that needs no network and draws with the page's own code.

- `contents` asks the coordinator for everything.
- `page` writes it into a file with the script and the style sheet in `static/`, which `make web` builds from `web/`.
"""
