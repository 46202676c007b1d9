"""Over a vocabulary: draw.py draws tokens where nothing is cut; logits_slice.py is a softmax that comes in slices."""

from k3rl.kernels.sampling.draw import draw
from k3rl.kernels.sampling.logits_slice import RunningSoftmax, add_slice, slice_gradient

__all__ = ["RunningSoftmax", "add_slice", "draw", "slice_gradient"]
