"""The contents of a trace: samples, media, spans, their rules (MMxxx), trace files, the JSON schema (numpy)."""
