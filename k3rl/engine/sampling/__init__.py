"""From logits to tokens.

`sampler.py` defines the draw, `device_sampler.py` does it where the logits are, `sample_rows.py` for all rows of a
step, `alternatives.py` records the likeliest others. `grammar.py` (with `json_schema.py`) keeps text to a schema or
grammar, `stopping.py` finds stop strings. Logits come from `engine/compute/`.
"""

from k3rl.engine.sampling.device_sampler import sample_uncut
from k3rl.engine.sampling.sampler import request_samples

__all__ = ["request_samples", "sample_uncut"]
