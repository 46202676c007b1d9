"""Over a vocabulary.

draw.py draws tokens where nothing is cut, cut.py where top-p, top-k or min-p do;
logits_slice.py is a softmax that comes in slices.
"""

from k3rl.kernels.sampling.cut import CutDraws, Cuts, draw_cut
from k3rl.kernels.sampling.draw import draw
from k3rl.kernels.sampling.logits_slice import RunningSoftmax, add_slice, slice_gradient

__all__ = ["CutDraws", "Cuts", "RunningSoftmax", "add_slice", "draw", "draw_cut", "slice_gradient"]
