"""Whether a small model learns with each algorithm, over several seeds: `make bench-learning`.

The demo's task, submitted to one local stack job by job. Every run that succeeded is kept in a file, so that a
benchmark that was broken off goes on where it was; the table and the figure are made from the files.
"""
