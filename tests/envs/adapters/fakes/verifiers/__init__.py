"""A stand-in for verifiers."""
