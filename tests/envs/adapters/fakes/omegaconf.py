"""A stand-in with the one name that SkyRL's configurations are made with."""

from types import SimpleNamespace


class OmegaConf:
    @staticmethod
    def create(values):
        return SimpleNamespace(**values)
