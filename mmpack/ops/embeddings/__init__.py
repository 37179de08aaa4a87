"""Vision features put into the embeddings of text, all deepstack levels at once."""
