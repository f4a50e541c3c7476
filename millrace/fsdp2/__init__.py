"""What is known of an FSDP2 job without starting it. Imports no torch."""
