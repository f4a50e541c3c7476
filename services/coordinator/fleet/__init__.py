"""The members of the fleet, which of them are alive, and which trainer is in charge."""
