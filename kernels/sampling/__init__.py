"""Drawing tokens: draw.py, where nothing is cut."""

from k3rl.kernels.sampling.draw import draw

__all__ = ["draw"]
