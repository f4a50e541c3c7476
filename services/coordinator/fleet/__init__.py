"""Who is alive: members of the fleet, and the trainer's seat."""
