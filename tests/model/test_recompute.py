"""Recomputed parts and attention by runs of queries: the same values and gradients with less memory."""

from __future__ import annotations

import pytest
import torch

from k3rl.model import InputError, K3Config, K3ForCausalLM, mla

CONFIG = K3Config.named("k3-nano")


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, torch.Tensor]] = []

    def router(self, layer, scores, cutoff):
        self.seen.append(("router", layer, cutoff.clone()))

    def attention_logits(self, layer, maximum):
        self.seen.append(("attention", layer, maximum.clone()))


def model() -> K3ForCausalLM:
    made = K3ForCausalLM(CONFIG, dtype=torch.float64)
    made.init_weights(0)
    return made


def step(made: K3ForCausalLM) -> tuple[torch.Tensor, dict[str, torch.Tensor], list, int]:
    """(logits, gradients by name, what was observed, bytes kept for the backward)."""
    made.observer = watcher = Watcher()
    ids = torch.randint(0, CONFIG.vocab_size, (1, 90), generator=torch.Generator().manual_seed(1))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = made(ids, cu_seqlens=torch.tensor([0, 50, 57, 90])).logits
    (logits * torch.linspace(-1, 1, CONFIG.vocab_size, dtype=torch.float64)).sum().backward()
    made.observer = None
    gradients = {name: p.grad for name, p in made.official_parameters() if p.grad is not None}
    return logits.detach(), gradients, watcher.seen, sum(kept.values())


@pytest.mark.parametrize("parts", [("attention",), ("mlp",), ("attention", "mlp")])
def test_recomputed_parts_give_the_same_bits_and_are_observed_once(parts) -> None:
    plain, again = model(), model()
    again.recompute(parts)
    logits, gradients, seen, kept = step(plain)
    logits_again, gradients_again, seen_again, kept_again = step(again)
    assert torch.equal(logits, logits_again)
    assert gradients.keys() == gradients_again.keys()
    for name, gradient in gradients.items():
        # Sums of gradients of what several parts read are formed in another order.
        torch.testing.assert_close(gradients_again[name], gradient, rtol=1e-11, atol=1e-13, msg=name)
    assert [one[:2] for one in seen] == [one[:2] for one in seen_again]
    assert all(torch.equal(one[2], other[2]) for one, other in zip(seen, seen_again, strict=True))
    assert kept_again < 0.8 * kept


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(InputError, match="attention, mlp"):
        model().recompute(["router"])


def test_attention_by_runs_of_queries_equals_attention_at_once(monkeypatch) -> None:
    logits, gradients, seen, kept = step(model())
    monkeypatch.setattr(mla, "SAVED_PROBABILITIES", 100)
    monkeypatch.setattr(mla, "LEAST_RUN", 7)  # several uneven runs
    logits_again, gradients_again, seen_again, kept_again = step(model())
    torch.testing.assert_close(logits_again, logits, rtol=1e-11, atol=1e-11)  # another order of float64 sums
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_again[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    for one, other in zip(seen, seen_again, strict=True):
        torch.testing.assert_close(one[2], other[2], rtol=1e-11, atol=1e-11)
    assert kept_again < kept
