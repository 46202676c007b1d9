"""Number formats: the one MXFP4/MXFP8 quantizer, and what a checkpoint stores of a master tensor.

mx.py      the definition, in plain torch; it never dispatches. Callers that want speed go through `k3rl.kernels`.
stored.py  which official parameter is stored in which format
"""

from k3rl.numerics import mx
from k3rl.numerics.mx import QuantizationError, project
from k3rl.numerics.stored import Stored, stored_dtype

__all__ = ["QuantizationError", "Stored", "mx", "project", "stored_dtype"]
