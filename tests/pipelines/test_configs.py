"""Impossible combinations are refused with the remedy."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from k3rl.actors import ClusterConfig, EngineConfig, RolloutConfig
from k3rl.config import ConfigError
from k3rl.model import K3Config
from k3rl.parallel import TrainerConfig
from k3rl.pipelines.configs import AblationChoices, ModelConfig, QuantizationConfig
from k3rl.pipelines.presets import PRESETS, distill, rl, sft
from k3rl.pipelines.start import check_layout, check_start, model_config, policy_sampling, start_policy


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
def test_learner_and_engines_load_side_by_side_unless_they_share_a_gpu(gpus, order):
    """An engine takes a share of what it finds free, so the learner must be there first."""
    called: list[str] = []
    fleet = SimpleNamespace(
        learner=SimpleNamespace(load=lambda *_: called.append("learner"), set_version=lambda _: None),
        rollouts=SimpleNamespace(
            start_loading=lambda _: called.append("engines begin") or [], loaded=lambda _: called.append("engines")
        ),
    )
    both = ClusterConfig(learner_actors=1, learner_device="cuda", rollout_device="cuda", learner_gpus=gpus)
    start_policy(fleet, rl().replace(cluster=both))
    assert called == order
