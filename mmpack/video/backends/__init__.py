"""One file for each library that decodes. `pyav` is the reference: the others are used where their pixels equal its."""
