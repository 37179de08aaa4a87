"""Many rows of a Parquet trace at once: which of them surely hold a sample that can be read and breaks no rule.

A filter in front of `Sample.from_dict` and `problems_of`, for speed alone: a row that is not sound isn't called broken,
it goes through them. n rows of one family; m items of a column of records, `row` [m] says whose each is.
"""
