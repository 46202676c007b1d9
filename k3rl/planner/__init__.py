"""Memory, traffic and time of a layout, before it runs."""
