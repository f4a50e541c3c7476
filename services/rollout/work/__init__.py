"""The job that a replica serves, its leases, and the groups that it answers them with."""
