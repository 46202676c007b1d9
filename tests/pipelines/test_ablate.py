"""The ablation study: equal starts, one part changed at a time, one table, one picture."""

from __future__ import annotations

import json

import pytest
import torch

from k3rl import cli
from k3rl.cli.ablate import PARTS
from k3rl.engine import Engine, SamplingParams
from k3rl.model import ABLATION_CHOICES, AblationConfig, K3Config, K3ForCausalLM
from k3rl.pipelines import ablate as study

NANO = K3Config.named("k3-nano")
EVERY = [variant for variants in study.PARTS.values() for variant in variants]


def test_the_command_line_names_the_parts_of_the_study() -> None:
    assert tuple(study.PARTS) == PARTS


def test_every_choice_of_a_model_and_a_trainer_is_tried() -> None:
    tried = {(variant.part, variant.choice) for variant in EVERY}
    assert {(part, choice) for part, choices in ABLATION_CHOICES.items() for choice in choices[1:]} <= tried
    assert {choice for part, choice in tried if part == "balancing"} == {"fixed_step", "auxiliary_loss", "none"}
    assert {choice for part, choice in tried if part == "optimizer"} == {"muon_whole", "adamw"}
    assert {choice for part, choice in tried if part == "quantization"} == {"post_hoc", "none"}


@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: f"{variant.part}-{variant.choice}")
def test_variants_start_from_the_weights_of_k3_wherever_both_have_them(variant) -> None:
    base = NANO.replace(num_experts=4)
    theirs = dict(study.build(study.BASE, base, 1).official_parameters())
    plain = variant.part == "quantization"  # then experts start unrounded
    shared = 0
    for name, parameter in study.build(variant, base, 1).official_parameters():
        if name in theirs and theirs[name].shape == parameter.shape and not (plain and ".experts." in name):
            assert torch.equal(parameter, theirs[name]), name
            shared += 1
    assert shared > 50


def test_one_table_and_one_picture_for_the_parts_asked_for(tmp_path, capsys) -> None:
    words = ["ablate", "--parts", "activation", "--steps", "2", "--batch-size", "4", "--out", str(tmp_path)]
    assert cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(line["part"], line["choice"]) for line in report["results"]] == [
        ("K3", "as it is"),
        ("activation", "swiglu"),
    ]
    for line in report["results"]:
        assert {"loss", "max_vio", "max_activation", "max_logit", "grad_norm"} <= line.keys()
        assert all(line[key] > 0 for key in ("loss", "max_vio", "max_activation", "max_logit", "grad_norm"))
    assert json.loads((tmp_path / "ablate.json").read_text())["results"] == report["results"]
    picture = (tmp_path / "ablate.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 10_000
    again = study.ablate(["activation"], steps=2, batch_size=4)
    assert again[1].loss == report["results"][1]["loss"]  # the same seed gives the same run
    text = study.table(again)
    assert text.splitlines()[1].startswith("K3")
    assert f"{again[1].loss:.4f}" in text


def test_seeds_are_averaged_and_their_spread_is_shown() -> None:
    both = study.ablate([], steps=1, batch_size=2, seeds=(0, 1), heldout=8)[0]
    single = [study.ablate([], steps=1, batch_size=2, seeds=(seed,), heldout=8)[0].loss for seed in (0, 1)]
    assert both.loss == pytest.approx(sum(single) / 2)
    assert both.loss_spread == pytest.approx(abs(single[0] - single[1]) / 2**0.5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parts", "residuals"], "nearest: residual"),
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--model", "k3"], "there is no model 'k3'"),
    ],
)
def test_mistakes_on_the_command_line_are_named(words, message, capsys) -> None:
    assert cli.main(["ablate", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_engine_samples_from_a_model_with_every_part_replaced() -> None:
    ablation = AblationConfig(attention="mla_rope", experts="full_width", residual="sum", activation="swiglu")
    model = K3ForCausalLM(NANO.replace(num_experts=4, ablation=ablation))
    model.init_weights(1)
    prompts = [[5, 6, 7, 8], [9, 10]]
    for prompt, found in zip(
        prompts,
        Engine(model, max_running=2).generate(prompts, SamplingParams(temperature=0, max_tokens=5)),
        strict=True,
    ):
        logits = model(torch.tensor([[*prompt, *found.token_ids]])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(found.token_ids)
