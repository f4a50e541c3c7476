"""What slows a job down: from its spans and step metrics to findings, with the figures and what to change.

`summary.py` reduces some steps to a `Summary`, `findings.py` judges it. Both are pure functions.
"""
