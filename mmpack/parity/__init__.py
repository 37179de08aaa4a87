"""Do engine and trainer see the same layout? Names the first difference, its cause and the fix."""
