"""Every metric that Millrace reports, declared once with its unit, meaning and owner. Needs no torch.

- `step/` declares the step metrics, the values in the rows of a job, a file for each subject.
- `catalogue` finds the declaration of a key and checks the keys that a service reports.
- `prometheus/` declares the Prometheus metrics that the services serve at `/metrics`, a file for each owner.

`python docs/metrics_page.py > docs/metrics.md` writes the reference page from these declarations.
"""
