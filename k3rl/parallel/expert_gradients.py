"""Gradients of routed experts: where their banks add them up, and which experts have one."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import nn

from k3rl.model import EXPERT_LEAVES, K3ForCausalLM, clear_gradients
from k3rl.optim import FixedGradients

EXPERT = re.compile(r"\.experts\.(\d+)\.")  # in a parameter's name: which expert it is of


class ExpertGradients:
    """The sums of a model's banks of experts, which each backward adds to at fixed addresses.

    sums: of each bank that trains; banks: those banks. views: by parameter name, where its gradient adds up.
    rows int32 [experts of all banks] on the device: above 0 for experts that have a gradient; one tensor, so that the
    host reads once. by_autograd: the other parameters, whose gradients autograd makes.
    """

    def __init__(self, model: K3ForCausalLM, params: Mapping[str, nn.Parameter]) -> None:
        self._params = params
        banks = [part.bank for part in model.moe_parts()]
        trains = any(EXPERT.search(name) for name in params)
        counts = [bank.experts for bank in banks]
        self.rows = torch.zeros(sum(counts) if trains else 0, dtype=torch.int32, device=model.device)
        for bank, rows in zip(banks, self.rows.split(counts) if trains else [None] * len(banks), strict=True):
            bank.keep_sums(rows)
        self.banks = [bank for bank in banks if bank.sums is not None]
        self.sums = [bank.sums for bank in banks if bank.sums is not None]
        by_leaf = {leaf: view for sums in self.sums for leaf, view in sums.places()}
        self.views = {name: by_leaf[p] for name, p in params.items() if p in by_leaf}
        summed = {leaf for sums in self.sums for leaf in sums.leaves}
        self.by_autograd = [parameter for parameter in params.values() if parameter not in summed]

    @property
    def fixed(self) -> FixedGradients | None:
        """Where gradients of experts add up, and who has one, for a captured step; None where autograd keeps them."""
        if not self.sums:
            return None
        leaves = [leaf for sums in self.sums for leaf in sums.leaves]
        number = {leaf: place // EXPERT_LEAVES for place, leaf in enumerate(leaves)}
        places = {name: (view, number[self._params[name]]) for name, view in self.views.items()}
        return FixedGradients(self.rows, places)

    def clear(self, *, leaves: bool) -> None:
        """Zeros everywhere. leaves: see `clear_gradients` of the banks."""
        clear_gradients(self.sums, leaves=leaves)

    def assume_unchanged(self) -> None:
        """Leaves have a `.grad` as after the step before, so that `attach` has to look only at those that differ."""
        for sums in self.sums:
            sums.attach_as_before()

    def count_rows(self) -> None:
        """Experts that only the host knows to have rows have them in `rows` too."""
        for sums in self.sums:
            sums.tell()

    def attach(self) -> None:
        """Gives the leaves of experts their `.grad` after backwards, where rows were counted on the device."""
        if self.sums:
            self.count_rows()
            counts = self.rows.tolist()
            for sums in self.sums:
                sums.attach(counts[: len(sums.rows)])
                del counts[: len(sums.rows)]
