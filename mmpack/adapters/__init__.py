"""Other frameworks, one module or folder each: what they hold becomes samples, and samples or batches become theirs.

What several of them share: `row_sample`, `processed_media`, `loss_values`, `json_values`, `checks`.
"""
