"""The stand-in's types of generic classes."""

from verifiers.v1 import EnvConfig


def concrete_type(kind, base, origin):
    return EnvConfig
