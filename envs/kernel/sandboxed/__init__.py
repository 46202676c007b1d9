"""What runs inside a sandbox, and the task files; torch and triton may be imported here."""
