"""Files that run under the Python of a foreign environment; they import nothing of k3rl."""
