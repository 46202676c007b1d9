"""What runs inside a sandbox, beside an agent program."""
