"""Media over runs of placeholders, positions, forests of shared prefixes, fingerprints and cache keys (numpy)."""
