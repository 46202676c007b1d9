"""The root configs of the pipelines: what a run is, whole, validated before anything starts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from k3rl.actors import ClusterConfig
from k3rl.config import NOT_HASHED, Config, ConfigError
from k3rl.envs import EnvConfig
from k3rl.losses import GRPO, Correction, CrossEntropy, K3Policy, OnPolicyDistill
from k3rl.optim import Schedule
from k3rl.parallel import LearnerConfig, ScorerConfig, TrainerConfig, check_backend
from k3rl.run import MetricsConfig


class QuantizationConfig(Config):
    """What the model computes with; written into the checkpoint and obeyed on load.

    A key that is not set is that of the checkpoint, or for fresh weights of K3 mxfp4, mxfp8 and ceil.
    """

    weights: Literal["mxfp4", "post_hoc", "none"] | None = None
    """Routed experts hold MXFP4 values in every stage; or full precision until a checkpoint is saved; or always. A
    checkpoint is what it is, and another value than its own is refused, but for plain experts of Kimi Linear: with
    mxfp4 they are quantized as they are loaded, which says how much that takes."""
    activations: Literal["mxfp8", "none"] | None = None
    """Inputs of routed experts are rounded to MXFP8, or read as they are. Not set, it is mxfp8 also for a checkpoint
    with MXFP4 experts that does not say, such as the official one."""
    scale_rule: Literal["ceil", "floor", "even"] | None = None
    """How a block's scale is chosen. Another than a checkpoint's own is refused."""


class AblationChoices(Config):
    """What stands in the place of each part that K3 brought; the defaults are K3's (`k3rl ablate` compares them)."""

    attention: Literal["hybrid", "mla", "mla_rope"] = "hybrid"
    experts: Literal["latent_norm", "latent", "full_width"] = "latent_norm"
    residual: Literal["attn_res", "sum"] = "attn_res"
    activation: Literal["situ", "swiglu"] = "situ"


class ModelConfig(Config):
    """Where the weights come from."""

    start: str = "k3-nano"
    """A named size (fresh weights), or the directory of a checkpoint in the official layout."""
    quantization: QuantizationConfig = QuantizationConfig()
    ablation: AblationChoices = AblationChoices()
    """Used for fresh weights; a checkpoint brings its own."""


Effort = Literal["low", "high", "max"]


def _check_effort(where: str, thinking: bool, effort: Effort | None) -> None:
    """Raises ValueError for an effort that nothing thinks with."""
    if effort is not None and not thinking:
        raise ValueError(f"{where}.thinking_effort is {effort} and {where}.thinking is false; set both, or neither")


class SamplingConfig(Config):
    """How rollouts are sampled."""

    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1: the smallest set of tokens with this share of the mass. What each token was drawn from is recorded, and
    the learner renormalizes over the same set; so too for `top_k` and `min_p`."""
    top_k: int = Field(0, ge=0)
    """The k likeliest tokens; 0 is off."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Tokens with at least this share of the largest probability; 0 is off."""
    max_tokens: int = Field(96, ge=1)
    """Sampled tokens of one turn at most; a task's own budget may be tighter."""
    replay_routes: bool | None = None
    """Training sends each token to the experts that computed it in the rollout, which are recorded beside it. In bf16
    the learner may otherwise choose others where scores nearly tie; in float32 both choose alike. None: where learner
    or engine compute in bf16, with k3rl's own engine."""
    thinking: bool = False
    """Assistant turns begin in the think channel. What is thought there is sampled and trained; answers are what comes
    behind it."""
    thinking_effort: Effort | None = None
    """With `thinking`: what the prompt says of how much to think."""

    @model_validator(mode="after")
    def _effort_needs_thinking(self) -> SamplingConfig:
        _check_effort("sampling", self.thinking, self.thinking_effort)
        return self


class EvalConfig(Config):
    """The held-out measurement; the same config on the same checkpoint gives the same figure."""

    n: int = Field(512, ge=1)
    """Held-out tasks."""
    every: int | None = Field(None, ge=1)
    """Of RL and distillation: steps between evaluations while the run goes on, at temperature 1, on what training
    leaves of the engines and of one version of the weights (`eval/...` in docs/runs.md). None: none."""
    every_n: int = Field(128, ge=1)
    """Held-out tasks of each of these."""
    n_family: int = Field(128, ge=0)
    """Tasks of the family that never occurs in training, reported apart."""
    seed: int = 0
    """Draws the tasks and the samples; independent of the run's seed, so that runs are compared on the same tasks."""
    max_tokens: int = Field(96, ge=1)
    max_running: int | None = Field(None, ge=1)
    """Sequences that one engine decodes at a time, in training and in the measurement. None: 256, and on a GPU up to
    1,024 where their states take a quarter of the engine's memory at most."""
    thinking: bool = False
    """As `sampling.thinking`, for the measurement; a policy that is trained to think is measured so."""
    thinking_effort: Effort | None = None

    @model_validator(mode="after")
    def _effort_needs_thinking(self) -> EvalConfig:
        _check_effort("evaluation", self.thinking, self.thinking_effort)
        return self


class ScheduleConfig(Config):
    """Learning-rate factor by step."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(5, ge=0)
    final_fraction: float = Field(0.1, ge=0, le=1)

    def build(self, total_steps: int) -> Schedule:
        return Schedule(self.kind, self.warmup_steps, total_steps, final_fraction=self.final_fraction)


class StageConfig(Config):
    """What every training loop has."""

    seed: int = 0
    """Every random draw of the stage comes from it."""
    model: ModelConfig = ModelConfig()
    env: EnvConfig = EnvConfig()
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvalConfig = EvalConfig()
    trainer: TrainerConfig = TrainerConfig()
    learner: LearnerConfig = LearnerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    metrics: MetricsConfig = Field(MetricsConfig(), json_schema_extra=NOT_HASHED)
    save_every: int = Field(20, ge=1)
    """Steps between training states. The last whole step is saved too when a run is interrupted."""
    keep_states: int = Field(2, ge=1)
    resume_from: str = Field("latest", pattern=r"^(latest|previous|step_\d+)$", json_schema_extra=NOT_HASHED)
    """Where `--resume` goes on: the latest training state, the one before it, or the named one."""
    max_seconds: float | None = Field(None, gt=0)
    """Ends the stage after this long even if steps are left."""

    @model_validator(mode="after")
    def _the_backend_can_train_it(self) -> StageConfig:
        try:
            check_backend(self.learner, self.trainer)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self


class SFTConfig(StageConfig):
    """Supervised fine-tuning until the held-out loss stops falling."""

    data: str | None = None
    """JSONL or Parquet chat data (`messages`); None writes the environment's own demonstrations."""
    heldout_data: str | None = None
    thinking: Literal["auto", "on", "off"] = "auto"
    """Whether assistant turns have a think channel, in which their `reasoning_content` is trained: in conversations
    that have any, in all, or in none."""
    thinking_effort: Effort | None = None
    """What conversations with a think channel say of how much to think; a row's own `thinking_effort` comes first."""
    demonstrations: int = Field(16_000, ge=1)
    """How many demonstrations to write when `data` is None."""
    heldout_examples: int = Field(256, ge=1)
    batch_size: int = Field(64, ge=1)
    max_steps: int = Field(400, ge=1)
    check_every: int = Field(20, ge=1)
    """Steps between held-out losses."""
    patience: int = Field(2, ge=1)
    """Checks without `min_gain` before the loss counts as flat."""
    min_gain: float = Field(0.01, ge=0)
    """Relative fall of the held-out loss that counts as falling."""
    decay_steps: int = Field(30, ge=0)
    """After the loss is flat, the learning rate falls linearly to its final fraction over these steps."""

    @model_validator(mode="after")
    def _data_come_in_pairs(self) -> SFTConfig:
        if (self.data is None) != (self.heldout_data is None):
            raise ValueError("data and heldout_data go together: name both files, or neither to use demonstrations")
        return self

    def loss(self) -> CrossEntropy:
        return CrossEntropy()


class K3Objective(Config):
    """K3's own objective (report 4, with K2.5's equation 1): gradient mask outside the band, squared log-ratio."""

    type: Literal["k3"] = "k3"
    ratio_low: float = Field(0.5, gt=0, lt=1)
    ratio_high: float = Field(2.0, gt=1)
    tau: float = Field(0.02, ge=0)

    normalise: Literal["none"] = "none"
    token_weights: Literal["token"] = "token"

    def loss(self, correction: Correction) -> K3Policy:
        return K3Policy(self.ratio_low, self.ratio_high, self.tau, correction)


class GRPOObjective(Config):
    """GRPO: advantages divided by the group's deviation, clipped ratio, mean over each sequence."""

    type: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)

    normalise: Literal["std"] = "std"
    token_weights: Literal["sequence"] = "sequence"

    def loss(self, correction: Correction) -> GRPO:
        return GRPO(self.clip_low, self.clip_high, correction)


Objective = Annotated[K3Objective | GRPOObjective, Field(discriminator="type")]


class CorrectionConfig(Config):
    """Importance correction, token by token, in place of the objective's own band or clip (docs/algorithms.md)."""

    type: Literal["none", "truncated", "masked"] = "none"
    """none: the objective's own. truncated: the ratio of learner to sampler weighs a token, up to `high` (TIS). masked:
    tokens whose ratio is outside [low, high] have no policy gradient (MIS, IcePop)."""
    low: float = Field(0.5, ge=0, lt=1)
    """masked: the smallest ratio that counts."""
    high: float | None = Field(None, gt=1)
    """The largest; None is 2 for truncated and 5 for masked."""

    @model_validator(mode="after")
    def _bounds_bound_something(self) -> CorrectionConfig:
        if self.type == "none" and self.high is not None:
            raise ValueError(f"correction.high is {self.high} and correction.type none; set type, or leave high out")
        if self.type != "masked" and self.low != type(self).model_fields["low"].default:
            raise ValueError(f"correction.low is of type masked, and correction.type is {self.type}")
        return self

    def build(self) -> Correction:
        high = self.high if self.high is not None else {"truncated": 2.0, "masked": 5.0}.get(self.type, 2.0)
        return Correction(self.type, self.low, high)


class GuardConfig(Config):
    """Limits of drift (docs/algorithms.md). Beyond one the run says so, in its output and as `guard/passed_limits`."""

    at_limit: Literal["warn", "stop"] = "warn"
    """stop: the run saves its state and ends, with status `stopped`."""
    window: int = Field(5, ge=1)
    """Steps that each number is a mean over, and first steps that entropy and length are compared with."""
    kl: float | None = Field(0.05, gt=0)
    """Largest mean KL(sampler to learner) in nats; None for this and each below: no limit."""
    entropy: float | None = Field(0.05, gt=0, lt=1)
    """Smallest entropy, as a share of that of the first steps."""
    length: float | None = Field(3.0, gt=1)
    """Largest factor by which turns may become longer, or shorter, than in the first steps."""
    part_share: float | None = Field(0.95, gt=0, lt=1)
    """Largest share of one named part in a reward of several, where it was below in the first steps."""


class RolloutsConfig(Config):
    """When rollouts and training take turns (docs/loop.md)."""

    mode: Literal["synchronous", "partial", "asynchronous"] = "synchronous"
    """synchronous: a batch is played by one version of the weights, `max_staleness` trainings old; equal seeds give
    equal bits. partial: a phase ends when `fraction` of its episodes have ended, and the rest goes on in the next one
    with newer weights. asynchronous: episodes run while the learner trains and while weights arrive."""
    max_off_policy_steps: int | None = Field(None, ge=1)
    """Groups with a token from more trainings ago are dropped or aborted, and counted. asynchronous: None is 1.
    partial: None keeps all."""
    fraction: float = Field(0.8, gt=0, le=1)
    """partial: share of the active episodes that ends a phase."""
    in_flight: int | None = Field(None, ge=1)
    """Episodes that run at once, at most; None leaves it to the batch and, asynchronous, to `max_off_policy_steps`."""
    keep_s: float | None = Field(30.0, ge=0)
    """partial, asynchronous: how often, in seconds, an episode whose environment can be paused is remembered between
    two turns. A training state has what is remembered, and a resumed run goes on with those episodes; others, and all
    with None, it plays again."""

    @model_validator(mode="after")
    def _keys_are_those_of_the_mode(self) -> RolloutsConfig:
        for name, modes in (
            ("max_off_policy_steps", ("partial", "asynchronous")),
            ("fraction", ("partial",)),
            ("in_flight", ("partial", "asynchronous")),
            ("keep_s", ("partial", "asynchronous")),
        ):
            if self.mode not in modes and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"rollouts.{name} is of the modes {' and '.join(modes)}; rollouts.mode is {self.mode}")
        return self


class RolloutStageConfig(StageConfig):
    """A stage whose data the policy samples itself."""

    steps: int = Field(40, ge=1)
    batch_size: int = Field(256, ge=1)
    """Episodes of one step."""
    group_size: int = Field(8, ge=1)
    """Episodes of one task."""
    optimizer_steps: int = Field(1, ge=1)
    """Optimizer steps on each rollout batch, each on its share of the groups."""
    sampling: SamplingConfig = SamplingConfig()
    max_staleness: Literal[0, 1] = 0
    """Of synchronous rollouts. 0: learner and rollouts alternate. 1: the next batch is sampled while the learner trains
    on this one."""
    rollouts: RolloutsConfig = RolloutsConfig()
    correction: CorrectionConfig = CorrectionConfig()
    guard: GuardConfig = GuardConfig()
    failure_limit: float = Field(0.25, ge=0, le=1)
    """Share of episodes without a reward above which the run stops."""

    @model_validator(mode="after")
    def _groups_fill_the_batch(self) -> RolloutStageConfig:
        if self.batch_size % self.group_size:
            near = max(self.group_size, self.batch_size // self.group_size * self.group_size)
            raise ValueError(
                f"group_size {self.group_size} does not divide batch_size {self.batch_size}; "
                f"use batch_size {near} or {near + self.group_size}"
            )
        if self.max_staleness and self.rollouts.mode != "synchronous":
            raise ValueError(
                f"max_staleness {self.max_staleness} is of synchronous rollouts, and rollouts.mode is "
                f"{self.rollouts.mode}; set max_staleness to 0, and bound what is old by rollouts.max_off_policy_steps"
            )
        groups = self.batch_size // self.group_size
        if groups < self.optimizer_steps:
            raise ValueError(
                f"optimizer_steps {self.optimizer_steps} is more than the {groups} groups of a batch; "
                f"use at most {groups}, or a larger batch_size"
            )
        return self


class RLConfig(RolloutStageConfig):
    """Reinforcement learning with rewards from executed programs."""

    objective: Objective = K3Objective()
    optimizer_steps: int = Field(2, ge=1)
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted within each batch, so nothing can be learned from them."""

    @model_validator(mode="after")
    def _a_baseline_needs_a_group(self) -> RLConfig:
        if self.group_size < 2:
            raise ValueError(f"group_size is {self.group_size}; a group baseline needs at least 2 episodes of a task")
        return self


class DistillConfig(RolloutStageConfig):
    """On-policy distillation: the student's own tokens, rewarded by the teacher's log-ratio."""

    teachers: dict[str, str] = {}
    """Checkpoint or adapter directory of the teacher of each domain; `*` serves every domain not named."""
    teacher: ScorerConfig = ScorerConfig()
    """How teachers score. Each is whole on each rank of the learner, and nothing of `trainer` is theirs."""
    reward_max: float = Field(3.0, gt=0)
    """The log-ratio of a token is clipped to +- this many nats."""
    ratio_low: float = Field(0.5, gt=0, lt=1)
    ratio_high: float = Field(2.0, gt=1)
    tau: float = Field(0.02, ge=0)
    steps: int = Field(15, ge=1)
    batch_size: int = Field(128, ge=1)
    group_size: int = Field(1, ge=1)

    def loss(self) -> OnPolicyDistill:
        return OnPolicyDistill(self.reward_max, self.ratio_low, self.ratio_high, self.tau, self.correction.build())


class QuickstartConfig(Config):
    """The main job: SFT, RL, distillation, export, each measured on the same held-out tasks."""

    seed: int = 0
    """Seeds every stage."""
    cluster: ClusterConfig = ClusterConfig()
    evaluation: EvalConfig = EvalConfig()
    sft: SFTConfig = SFTConfig()
    rl: RLConfig = RLConfig()
    distill: DistillConfig = DistillConfig()
    more_sft: bool = True
    """Also spend RL's compute on more SFT, from the same start, for the comparison in the table."""
    metrics: MetricsConfig = Field(MetricsConfig(), json_schema_extra=NOT_HASHED)
    """Of the whole job; those of its stages stay as they are."""

    @model_validator(mode="after")
    def _one_place_for_metrics(self) -> QuickstartConfig:
        for name in ("sft", "rl", "distill"):
            if getattr(self, name).metrics != MetricsConfig():
                raise ValueError(f"{name}.metrics is set; the stages of this job are one run: set metrics in its place")
        return self
