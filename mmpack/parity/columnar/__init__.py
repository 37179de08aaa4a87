"""Two Parquet traces compared by columns: surely equal pairs never become samples."""
