"""From logits to tokens.

`sampler.py` defines the draw, `device_sampler.py` does it where the logits are, `sample_rows.py` for all rows of a
step, `alternatives.py` records the likeliest others. `grammar.py` keeps text to a schema, pattern or grammar
(`json_schema.py`, `patterns.py`, `call_format.py`), which `grammar_process.py` has compiled elsewhere; `stopping.py`
finds stop strings. Logits come from `engine/compute/`.
"""

from k3rl.engine.sampling.device_sampler import sample_uncut
from k3rl.engine.sampling.grammar import end_compilers
from k3rl.engine.sampling.sampler import request_samples

__all__ = ["end_compilers", "request_samples", "sample_uncut"]
