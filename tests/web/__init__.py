"""The page in headless Chromium: `make test-web`."""
