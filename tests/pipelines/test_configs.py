"""Impossible combinations are refused with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from k3rl.actors import ClusterConfig, EngineConfig, RolloutConfig
from k3rl.config import ConfigError
from k3rl.losses import Correction
from k3rl.model import K3Config
from k3rl.model import QuantizationConfig as Stored
from k3rl.parallel import TrainerConfig
from k3rl.pipelines.configs import AblationChoices, CorrectionConfig, ModelConfig, QuantizationConfig, RLConfig
from k3rl.pipelines.distill import Distillation
from k3rl.pipelines.presets import PRESETS, distill, rl, sft
from k3rl.pipelines.rl import Reinforcement
from k3rl.pipelines.start import (
    check_layout,
    check_start,
    model_config,
    policy_sampling,
    quantization_of,
    start_policy,
)


def test_a_group_size_that_does_not_divide_the_batch_names_the_sizes_that_would():
    with pytest.raises(ConfigError, match="group_size 8 does not divide batch_size 20; use batch_size 16 or 24"):
        rl().replace(batch_size=20)


def test_more_optimizer_steps_than_groups_are_refused():
    with pytest.raises(ConfigError, match="at most 2"):
        rl().replace(batch_size=16, optimizer_steps=3)


def test_degrees_that_do_not_divide_the_learner_are_refused_before_anything_starts():
    odd = sft().replace(trainer=TrainerConfig(expert_parallel=3))
    with pytest.raises(ConfigError, match="2 learner ranks cannot be data x expert_parallel 3"):
        check_start(odd)
    check_start(sft().replace(trainer=TrainerConfig(expert_parallel=2)))
    many = ClusterConfig(learner_actors=17)  # k3-nano has 16 experts
    with pytest.raises(ConfigError, match="the model has 16 experts; use at most 16"):
        check_start(sft().replace(cluster=many, trainer=TrainerConfig(expert_parallel=17)))


@pytest.mark.parametrize(("trainer", "engine"), [(True, False), (False, True)])
def test_exact_training_and_exact_engines_go_together(trainer, engine):
    both = ClusterConfig(engine=EngineConfig(exact=engine))
    stage = rl().replace(trainer=TrainerConfig(exact=trainer), cluster=both)
    with pytest.raises(ConfigError, match=r"trainer\.exact is .* cluster\.engine\.exact is") as caught:
        check_start(stage)
    assert caught.value.key == "trainer.exact"
    check_layout(ClusterConfig(engine=EngineConfig(exact=trainer)), stage)
    check_layout(both, sft().replace(trainer=TrainerConfig(exact=trainer)))  # nothing is sampled to be trained on


def test_exact_training_on_tokens_of_another_engine_is_refused():
    server = RolloutConfig(backend="vllm", url=("http://one:1", "http://two:2"))
    foreign = ClusterConfig(rollout=server, engine=EngineConfig(exact=True))
    with pytest.raises(ConfigError, match=r"cluster\.rollout\.backend"):
        check_layout(foreign, rl().replace(trainer=TrainerConfig(exact=True)))


def test_what_a_run_may_cut_reaches_the_sampler():
    stage = rl()
    chosen = policy_sampling(
        stage.replace(
            sampling=stage.sampling.replace(
                temperature=0.9, top_p=0.8, top_k=40, min_p=0.05, max_tokens=7, replay_routes=True
            )
        )
    )
    found = chosen.temperature, chosen.top_p, chosen.top_k, chosen.min_p, chosen.max_tokens, chosen.return_routes
    assert found == (0.9, 0.8, 40, 0.05, 7, True)
    assert not policy_sampling(stage).return_routes


def test_a_group_of_one_has_no_baseline():
    with pytest.raises(ConfigError, match="at least 2"):
        rl().replace(group_size=1)


def test_training_data_without_heldout_data_are_refused():
    with pytest.raises(ConfigError, match="go together"):
        sft().replace(data="chats.jsonl")


def test_every_preset_is_a_valid_config_with_a_docstring():
    for presets in PRESETS.values():
        for preset in presets.values():
            assert preset() == preset()
            assert preset.__doc__
    assert distill().group_size == 1


def test_quantization_and_ablation_choices_reach_the_model():
    chosen = ModelConfig(
        quantization=QuantizationConfig(weights="post_hoc", activations="none"),
        ablation=AblationChoices(attention="mla", residual="sum"),
    )
    made = model_config(sft().replace(model=chosen))
    assert (made.quantization.weights, made.quantization.activations) == ("post_hoc", "none")
    assert (made.ablation.attention, made.ablation.residual, made.ablation.activation) == ("mla", "sum", "situ")


def test_a_start_that_is_neither_a_size_nor_a_checkpoint_is_refused_by_name():
    with pytest.raises(ConfigError, match="k3-nanoo"):
        check_start(sft().replace(model=ModelConfig(start="k3-nanoo")))


def test_distillation_without_a_teacher_names_the_family_that_lacks_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    student = distill().replace(model=ModelConfig(start=str(tmp_path)))
    with pytest.raises(ConfigError, match="no teacher for list"):
        check_start(student)


def test_a_teacher_with_another_vocabulary_is_refused_before_anything_starts(tmp_path):
    for name, size in (("student", 512), ("teacher", 640)):
        (tmp_path / name).mkdir()
        about = K3Config.named("k3-nano").replace(vocab_size=size).to_dict()
        (tmp_path / name / "config.json").write_text(json.dumps(about))
    start = ModelConfig(start=str(tmp_path / "student"))
    with pytest.raises(ConfigError, match="vocabulary of 640, and the student one of 512"):
        check_start(distill().replace(model=start, teachers={"*": str(tmp_path / "teacher")}))
    check_start(distill().replace(model=start, teachers={"*": str(tmp_path / "student")}))


@pytest.mark.parametrize(
    ("gpus", "order"), [(1.0, ["engines begin", "learner", "engines"]), (0.5, ["learner", "engines begin", "engines"])]
)
def test_learner_and_engines_load_side_by_side_unless_they_share_a_gpu(gpus, order, tmp_path):
    """An engine takes a share of what it finds free, so the learner must be there first."""
    called: list[str] = []
    fleet = SimpleNamespace(
        learner=SimpleNamespace(load=lambda *_: called.append("learner"), set_version=lambda _: None),
        rollouts=SimpleNamespace(
            start_loading=lambda *_: called.append("engines begin") or [], loaded=lambda _: called.append("engines")
        ),
    )
    both = ClusterConfig(learner_actors=1, learner_device="cuda", rollout_device="cuda", learner_gpus=gpus)
    start_policy(fleet, stored_config(tmp_path, says=True).replace(cluster=both))
    assert called == order


def stored_config(folder: Path, *, says: bool, **quantization) -> RLConfig:
    """RL from a checkpoint of which only the configuration is there."""
    built = K3Config.named("k3-nano").replace(quantization=Stored(**quantization)).to_dict()
    if not says:
        del built["k3rl_quantization"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(built))
    return rl().replace(model=ModelConfig(start=str(folder)))


@pytest.mark.parametrize(
    ("says", "stored", "chosen", "wanted"),
    [
        (False, {}, {}, {"activations": "mxfp8"}),  # as the official checkpoint is
        (False, {}, {"activations": "none"}, {"activations": "none"}),
        (False, {"weights": "none"}, {}, {}),
        (True, {"activations": "none"}, {}, {}),  # obeyed as it is
        (True, {"activations": "none"}, {"activations": "mxfp8"}, {"activations": "mxfp8"}),
        (True, {"scale_rule": "floor"}, {"scale_rule": "floor"}, {}),
    ],
)
def test_a_checkpoint_is_trained_as_it_says_or_as_the_configuration_asks(tmp_path, says, stored, chosen, wanted):
    config = stored_config(tmp_path / "ck", says=says, **stored)
    config = config.replace(model=config.model.replace(quantization=QuantizationConfig(**chosen)))
    calls = []
    fleet = SimpleNamespace(
        learner=SimpleNamespace(load=lambda *given: calls.append(given[-1]), set_version=lambda number: None),
        rollouts=SimpleNamespace(start_loading=lambda *given: calls.append(given[-1]), loaded=lambda _: None),
    )
    start_policy(fleet, config)
    assert calls == [wanted, wanted]  # learner and engines compute alike


def test_plain_experts_of_kimi_linear_are_quantized_at_load_where_that_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(K3Config.named("kimi-linear-nano").to_dict()))
    start = ModelConfig(start=str(tmp_path))
    asked = start.replace(quantization=QuantizationConfig(weights="mxfp4"))
    assert quantization_of(rl().replace(model=asked)) == {"weights": "mxfp4"}
    assert quantization_of(rl().replace(model=start)) == {}


@pytest.mark.parametrize("chosen", [{"weights": "none"}, {"scale_rule": "even"}])
def test_weights_and_scales_that_a_checkpoint_does_not_have_are_refused(tmp_path, chosen):
    config = stored_config(tmp_path / "ck", says=True)
    config = config.replace(model=config.model.replace(quantization=QuantizationConfig(**chosen)))
    with pytest.raises(ConfigError, match=f"model.quantization.{next(iter(chosen))} is .* was made with"):
        check_start(config)


def test_fresh_weights_have_what_is_chosen_and_otherwise_the_defaults():
    found = model_config(sft().replace(model=ModelConfig(quantization=QuantizationConfig(activations="none"))))
    assert found.quantization == Stored("mxfp4", "ceil", "none")
    assert model_config(sft()).quantization == Stored("mxfp4", "ceil", "mxfp8")


def test_a_correction_reaches_the_losses_of_both_pipelines_with_the_bounds_of_its_type():
    masked = CorrectionConfig(type="masked", low=0.4)
    assert Reinforcement(rl().replace(correction=masked)).loss.correction == Correction("masked", 0.4, 5.0)
    truncated = distill().replace(correction=CorrectionConfig(type="truncated"))
    assert Distillation(truncated).loss.correction == Correction("truncated", high=2.0)
    assert Reinforcement(rl()).loss.correction.type == "none"
    for wrong in ({"high": 3.0}, {"type": "truncated", "low": 0.1}):
        with pytest.raises(ValueError, match="correction"):
            CorrectionConfig(**wrong)
