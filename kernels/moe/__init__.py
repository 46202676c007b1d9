"""The routed experts: routing when decoding and when training, gathering, activation, load counts, MXFP8 inputs."""
