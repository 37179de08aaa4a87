"""Many rows of a Parquet trace at once: columns of Arrow and numpy, without a `Sample` for each row."""
