"""Other projects, one module each: what they hold becomes samples, what mmpack makes becomes theirs."""
