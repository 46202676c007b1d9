"""Which token comes next: distributions, constraints, stop strings, alternatives."""
