"""What a trace holds: samples, media, spans, their rules (MMxxx), trace files, the JSON schema (numpy)."""
