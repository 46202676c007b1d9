"""How a step is computed: captured decode and prefill steps, and the exact mode."""
