"""What is kept in host memory while the device does not need it."""
