"""Adapters to other frameworks, one module or folder each: their data becomes samples, and samples or batches theirs.

What several of them share: `row_sample`, `processed_media`, `loss_values`, `json_values`, `checks`.
"""
