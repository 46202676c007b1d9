"""Skinny matrix products: few rows with one matrix, with many, and with matrices held as MXFP4."""
