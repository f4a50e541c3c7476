"""A replica as a member of the fleet, whatever it does: registration, heartbeats, servers, draining and end."""
