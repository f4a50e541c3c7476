"""HTTP servers of the services: connections with limits, a server inside a service's event loop."""
