"""Users' own tasks in forms that are known elsewhere, each by `LOADER:PATH`.

rows       JSONL files, and a task source over what was read
humaneval  functions to be completed
swe        repositories to be changed until tests pass (sandboxed/run_tests.py runs those)
harbor     task directories of Harbor and terminal-bench
"""
