"""Whether a job can run on this machine: its files, functions and options, checked before the job is accepted."""
