"""Moving the bytes of a publication: sessions, channels, pipelines, kernels, checksums."""
