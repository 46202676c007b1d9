"""x"""
def emit_ptx(k): return ""
