"""What an optimizer step does to every number.

muon.py         momentum, update and MXFP4 values of masters      symmetric.py    products of Newton-Schulz
add_many.py     many gradients added to one flat tensor
"""

from k3rl.kernels.optim import muon, symmetric
from k3rl.kernels.optim.add_many import Table, add_many
from k3rl.kernels.optim.muon import mxfp4

__all__ = ["Table", "add_many", "muon", "mxfp4", "symmetric"]
