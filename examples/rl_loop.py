"""The whole algorithm of k3rl in one process: sample groups, execute and grade them, step, hand the weights on, repeat.

No Ray and no actors, but the real engine, sandbox, environment, losses and optimizer. A run of `k3rl rl` does the same
with each part in a process of its own (`pipelines/`, `actors/`). Run it with

    python examples/rl_loop.py                                # a short SFT warm start, then RL, in about three minutes
    python examples/rl_loop.py --start outputs/sft/export/sft # RL from a checkpoint in the official layout
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from k3rl.checkpoint import load_checkpoint, manifest_of, official_tensors, save_checkpoint, second_model
from k3rl.data import TrainBatch, chat_sequence, from_episodes
from k3rl.engine import Engine, EngineError
from k3rl.envs import Environment, EpisodeContext, TurnSettings, make, run_episode
from k3rl.envs.sandbox import ProgramRunner, provider_named
from k3rl.losses import CrossEntropy, K3Policy, group_advantages
from k3rl.model import K3Config, K3ForCausalLM
from k3rl.parallel import Trainer, TrainerConfig
from k3rl.tokens import Tokenizer
from k3rl.types import Completion, Episode, SamplingParams, Scored, Task


class InProcessPolicy:
    """The policy of episodes that are played together: their requests share the engine's batch.

    The engine steps when every live episode waits for tokens, so equal seeds give equal batches.
    """

    def __init__(self, engine: Engine, episodes: int) -> None:
        self._engine, self._live = engine, episodes
        self._waiting: dict[int, asyncio.Future[Completion]] = {}

    async def complete(self, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence = ()) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[self._engine.submit(prompt_ids, params)] = future
        self._sample_when_all_wait()
        return await future

    def leave(self) -> None:
        """One episode has ended."""
        self._live -= 1
        self._sample_when_all_wait()

    def _sample_when_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == self._live:
            futures, self._waiting = self._waiting, {}
            for number, outcome in self._engine.drain():
                if isinstance(outcome, EngineError):
                    futures[number].set_exception(outcome)
                else:
                    futures[number].set_result(outcome)


async def play(
    env: Environment, tasks: dict[str, Task], engine: Engine, tokenizer: Tokenizer, seed: int
) -> list[Episode]:
    """One ungraded episode for each id. An environment sees its task without the hidden part."""
    policy = InProcessPolicy(engine, len(tasks))
    sandboxes = provider_named("bwrap")
    programs = ProgramRunner(sandboxes) if env.needs_programs else None

    async def episode(number: int, name: str, task: Task) -> Episode:
        try:
            sampling = SamplingParams(temperature=1.0, max_tokens=64, seed=seed + number)
            context = EpisodeContext(seed=seed + number, programs=programs, sandboxes=sandboxes)
            settings = TurnSettings(tokenizer, sampling)
            return await run_episode(env.make_env(), task.public(), policy, settings, episode_id=name, context=context)
        finally:
            policy.leave()

    return list(await asyncio.gather(*(episode(n, name, task) for n, (name, task) in enumerate(tasks.items()))))


def graded(env: Environment, tasks: dict[str, Task], episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes with their scores: the rubric runs what they answered, with the hidden part of the task."""
    rubric = env.grader(provider="bwrap")
    try:
        scores = rubric.score_episodes([(tasks[episode.id], episode) for episode in episodes])
    finally:
        rubric.close()
    return [replace(episode, score=score) for episode, score in zip(episodes, scores, strict=True)]


def policy_batch(groups: Sequence[Sequence[Episode]]) -> TrainBatch | None:
    """Every sampled token, weighted by its episode's advantage; None where no group has rewards that differ.

    An episode without a reward leaves the batch and the baseline: missing is not zero.
    """
    trained: list[Episode] = []
    advantages: dict[str, float] = {}
    for group in groups:
        rewards = [e.score.reward if isinstance(e.score, Scored) else None for e in group]
        known = [
            (e, a) for e, a in zip(group, group_advantages(rewards, normalise="none"), strict=True) if a is not None
        ]
        trained += [episode for episode, _ in known]
        advantages |= {episode.id: advantage for episode, advantage in known}
    return from_episodes(trained, advantages, mode="token") if any(advantages.values()) else None


def publish(model: K3ForCausalLM, engine: Engine) -> None:
    """The learner's weights as the engine's next version: whole and proved by digests, or not at all."""
    tensors = {name: tensor.clone() for name, tensor in official_tensors(model)}
    engine.start_weight_update(engine.version + 1, manifest_of(tensors.items()))
    engine.update_weights(tensors.items())
    engine.finish_weight_update(engine.version + 1)


def warm_start(model: K3ForCausalLM, env: Environment, tokenizer: Tokenizer, steps: int, seed: int) -> None:
    """Supervised steps on the environment's demonstrations, so that some answers are right."""
    if env.demonstrations is None:
        raise SystemExit(f"{env.name} has no demonstrations to warm up on; name a checkpoint with --start")
    trainer = Trainer(model, TrainerConfig(muon_lr=0.02, adamw_lr=0.005))
    rows = env.demonstrations(seed, 2048, split="train")
    order = np.random.default_rng(seed)
    for step in range(steps):
        chosen = order.choice(len(rows), 48, replace=False)
        batch = TrainBatch.pack(
            [chat_sequence(f"row-{i}", rows[i]["messages"], None, tokenizer, False) for i in chosen]
        )
        metrics = trainer.train(batch, CrossEntropy(), lr_scale=min(1.0, (step + 1) / 10))
        if step % 20 == 19:
            print(f"sft {step + 1:3d}  loss {metrics.values()['loss/mean']:.3f}")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--env", default="coding-lists")
    words.add_argument("--start", help="a checkpoint directory; without one the policy is warmed up first")
    words.add_argument("--warm-steps", type=int, default=160)
    words.add_argument("--steps", type=int, default=20)
    words.add_argument("--groups", type=int, default=24)
    words.add_argument("--group-size", type=int, default=8)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--out", help="where the policy goes at the end, in the official layout")
    given = words.parse_args()

    env = make(given.env)
    if given.start:
        model, tokenizer = load_checkpoint(given.start, dtype=torch.float32), Tokenizer.load(given.start)
    else:
        model, tokenizer = K3ForCausalLM(K3Config.named("k3-nano"), dtype=torch.float32), Tokenizer.builtin()
        model.init_weights(given.seed)
        warm_start(model, env, tokenizer, given.warm_steps, given.seed)
    trainer, loss = Trainer(model, TrainerConfig(muon_lr=0.001, adamw_lr=0.001)), K3Policy(0.5, 2.0, 0.02)
    engine = Engine(second_model(model, packed=False), max_running=256, seed=given.seed)

    for step in range(given.steps):
        publish(model, engine)
        first = step * given.groups
        drawn = [env.source.get("train", first + n, given.seed) for n in range(given.groups)]
        tasks = {f"{step}-{n}-{k}": task for n, task in enumerate(drawn) for k in range(given.group_size)}
        episodes = asyncio.run(play(env, tasks, engine, tokenizer, seed=given.seed + step * len(tasks)))
        episodes = graded(env, tasks, episodes)
        groups = [episodes[n : n + given.group_size] for n in range(0, len(episodes), given.group_size)]
        rewards = [episode.score.reward for episode in episodes if isinstance(episode.score, Scored)]
        batch = policy_batch(groups)
        shown = {} if batch is None else trainer.train(batch, loss, temperature=1.0).values()
        drift = shown.get("mismatch/kl/mean", float("nan"))
        print(f"rl {step + 1:3d}  reward {np.mean(rewards):.3f} of {len(rewards)}  KL(sampler to learner) {drift:.1e}")
    if given.out:
        save_checkpoint(model, given.out, tokenizer=tokenizer)


if __name__ == "__main__":
    main()
