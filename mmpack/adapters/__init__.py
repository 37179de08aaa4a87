"""Frameworks: what they hold becomes samples, what mmpack makes becomes theirs. One module or folder per framework."""
