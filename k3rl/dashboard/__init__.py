"""The viewer of runs: a web server that only reads run directories, and the page it serves.

`server.py` and `static/` live here. Nothing in this room writes to a run, and nothing in it imports a model.
"""
