"""Publications that send only what changed since the version that the receivers hold."""
