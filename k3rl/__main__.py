"""`python -m k3rl` is the `k3rl` command."""

import sys

from k3rl.cli import main

sys.exit(main())
