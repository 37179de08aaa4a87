"""Selected log-probabilities of logits [T, V] at loss rows: the public function, plain torch, the kernels."""
