"""The repositories of `coding-repair`, each in a file of its own; `base` says what one is."""

from k3rl.envs.coding.repair.repositories.base import Mistake, Repository
from k3rl.envs.coding.repair.repositories.calc import CALC
from k3rl.envs.coding.repair.repositories.ledger import LEDGER
from k3rl.envs.coding.repair.repositories.rooms import ROOMS
from k3rl.envs.coding.repair.repositories.words import WORDS

REPOSITORIES = {one.name: one for one in (LEDGER, CALC, ROOMS, WORDS)}

__all__ = ["REPOSITORIES", "Mistake", "Repository"]
