"""The reference MiniTriton compiler: what `oracle` hands in. Standard library only; runs as `python3 -m minitriton`.

lexer, parser   text -> tokens -> syntax tree
typing          tree + constants -> a tree whose every expression has a type
lower           typed tree -> IR; passes: folding, common subexpressions, hoisting, dead code
interpret       runs IR on lists
emit_c          IR -> C, fused loops and register-tiled products; emit_ptx: IR -> PTX
"""
