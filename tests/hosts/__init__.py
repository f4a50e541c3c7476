"""Services on several hosts: network namespaces of this machine, joined by virtual links that are cut and throttled."""
