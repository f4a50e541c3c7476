"""The report of a job: one HTML file with curves, tables and samples, which needs no network and runs no script.

- `contents` asks the coordinator for everything.
- `page` puts the sections together; `sections` and `tables` make them, `curves` and `scales` the charts.
- `markup` makes elements. All text goes through it and is escaped when the page is written.
"""
