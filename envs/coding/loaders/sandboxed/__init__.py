"""What runs inside a grading sandbox."""
