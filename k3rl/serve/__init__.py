"""An engine over HTTP."""
