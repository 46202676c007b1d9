"""Where the stand-in keeps its loaders."""
