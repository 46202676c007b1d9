"""What runs in the sandbox with a repository."""
