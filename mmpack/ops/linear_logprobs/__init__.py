"""Selected log-probabilities of hidden states [T, H] and a head [V, H]: logits never exist."""
