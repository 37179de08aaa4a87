"""Where tokens and media lie: runs, occurrences, positions, prefix forests; fingerprints and cache keys. numpy only."""
