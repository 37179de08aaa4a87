"""The demonstration: drawn problems and clips, tiny models, the jobs of `mmpack smoke`, the matrix of frameworks."""
