"""States of earlier prefixes, in memory and on disk."""
