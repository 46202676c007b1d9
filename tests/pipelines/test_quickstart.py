"""The main job end to end, small: what it leaves, and that every figure can be had again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from k3rl.checkpoint import load_checkpoint, official_tensors, weights_of
from k3rl.cli import main
from k3rl.data.trajectories import read_groups, read_manifest
from k3rl.pipelines.rollout_metrics import reward_of
from k3rl.run.metrics import read_metrics, series
from k3rl.types import Episode

pytestmark = pytest.mark.timeout(400)  # a fixture is several runs of the command

# As in the small configuration: how many engines share the tasks decides the batches, and so the last bits.
ACTORS = ("--cluster.rollout-actors", "1", "--cluster.environment-actors", "1", "--cluster.reward-actors", "1")


@pytest.fixture(scope="module")
def finished(command, small):
    """(what --json printed, the run directory) of one quickstart."""
    report = command.json("rl", "quickstart", "@", str(small), "--seed", "3", "--out", "quick")
    return report, command.folder / "quick"


def test_the_report_has_its_keys_and_the_checkpoints_are_there(finished):
    report, run = finished
    wanted = "reward_before reward_rl reward_after sft_checkpoint rl_checkpoint export env n seconds peak_rss_mb run"
    assert set(wanted.split()) <= report.keys()
    assert report["env"] == "coding-lists"
    assert report["n"] == 6
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    for key in ("sft_checkpoint", "rl_checkpoint", "export"):
        model = load_checkpoint(run.parent / report[key])
        assert sum(1 for name, _ in official_tensors(model) if name.endswith("weight_packed")) > 0


def test_the_page_on_runs_explains_every_metric_and_file_of_a_run(finished):
    _, run = finished
    page = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    rows = read_metrics(run / "metrics.jsonl")
    env = "/".join(("", "coding-lists", ""))
    for name in {name for row in rows for name in row} - {"schema", "run"}:
        if "/parts/" in name:
            shown = f"reward/ENV/parts/PART/{name.rpartition('/')[2]}"
        elif "/metrics/" in name:
            shown = "env/ENV/metrics/NAME"
        elif name.startswith("reward/"):
            shown = "/".join(["reward/ENV", *("level_N" if "level_" in w else "FAMILY" for w in name.split("/")[2:])])
            shown = shown if name != "reward/coding-lists/mean" else "reward/ENV/mean"
        else:
            shown = name.replace(env, "/ENV/")
        last = shown.rpartition("/")[2]
        assert f"`{shown}`" in page or f"`{last}`" in page, name
    for path in run.iterdir():
        if path.name != "run.lock":
            assert f"`{path.name}" in page, path.name


@pytest.fixture(scope="module")
def measured_again(finished, command):
    """What `k3rl eval` says of the RL policy."""
    report, _ = finished
    return command.json("eval", report["rl_checkpoint"], report["env"], "--n", "6", "--n-family", "2", *ACTORS)


def test_the_same_checkpoint_gives_the_same_figure_again(finished, measured_again):
    report, _ = finished
    assert measured_again["pass_at_1"] == report["reward_rl"]
    first = report["evaluations"]["rl"]
    assert {key: measured_again[key] for key in first} == json.loads(json.dumps(first))


def test_metrics_hold_a_row_a_step_and_the_curve_is_drawn(finished):
    _, run = finished
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows if row["source"] == "rl"] == [0, 1]
    assert all("reward/coding-lists/mean" in row for row in rows if row["source"] == "rl")
    assert {row["source"] for row in rows} == {"sft", "rl", "more_sft", "distill"}
    assert (run / "reward.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_tensorboard_has_the_metrics_of_every_stage_when_it_is_asked_for(finished, shown_by_tensorboard):
    _, run = finished
    rows = read_metrics(run / "metrics.jsonl")
    folders = {path.name: shown_by_tensorboard(path) for path in (run / "tensorboard").iterdir()}
    assert folders.keys() == {row["source"] for row in rows} >= {"sft", "rl", "distill"}
    for stage, shown in folders.items():
        named = {name for row in rows if row["source"] == stage for name in row}
        assert shown.keys() == named - {"t", "step", "source", "attempt", "counts"}
        for name, pairs in shown.items():
            steps, values = zip(*series(rows, name, stage), strict=True)
            assert pairs == list(zip(steps, np.float32(values).tolist(), strict=True)), name


def test_a_stage_that_trains_an_adapter_publishes_and_leaves_the_adapter_alone(finished):
    report, run = finished
    folder = run.parent / report["export"]
    policy = load_checkpoint(folder)
    assert weights_of(folder) == run.resolve() / "export" / "sft"
    assert policy.adapter is not None
    assert policy.adapter.config.rank == 4
    assert any(bool(p.any()) for name, p in policy.adapter.parameters() if name.endswith("lora_B.weight"))
    rows = {(row["source"], row["step"]): row for row in read_metrics(run / "metrics.jsonl")}
    whole = sum(tensor.nbytes for _, tensor in official_tensors(policy))
    for step in (0, 1):
        row = rows["distill", step]
        if "publish/bytes_full" in row:
            assert row["publish/bytes_full"] == 2 * sum(p.numel() for _, p in policy.adapter.parameters()) < whole
            assert row["mismatch/canary"] < 1e-3


def stored_episodes(run: Path) -> list[Episode]:
    folder = run / "traces" / "trajectories"
    return [
        episode for entry in read_manifest(folder) for group in read_groups(folder, entry) for episode in group.episodes
    ]


def test_every_rollout_is_in_the_trajectories_with_tokens_that_extend_each_other(finished):
    _, run = finished
    episodes = stored_episodes(run)
    assert len(episodes) == 2 * 8 + 2 * 8  # two steps of RL and two of distillation
    assert len({episode.id for episode in episodes}) == len(episodes)
    for episode in episodes:
        assert reward_of(episode) is not None
        for branch in episode.branches:
            _, mask, logprobs = branch.tokens()
            assert mask.sum() == sum(len(turn.sampled_ids) for turn in branch.turns)
            assert (logprobs[mask] <= 0).all()


def test_the_stream_shows_the_same_episodes_and_tail_prints_them(finished, command):
    _, run = finished
    rows = [json.loads(line) for line in (run / "traces" / "stream.jsonl").read_text().splitlines()]
    assert sum(row["kind"] == "episode" for row in rows) == 32
    out, _ = command.run("tail", "quick", "--no-follow")
    assert "list:" in out


def replayed(capsys, run: Path, *words: str) -> dict:
    assert main(["replay", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_stored_rollout_tells_whether_a_checkpoint_is_the_policy_that_sampled_it(finished, capsys):
    _, run = finished
    stored = {episode.id: episode for episode in stored_episodes(run)}["rl-0-0-0"]
    (turn,) = stored.branches[0].turns
    alone = replayed(capsys, run, "rl-0-0-0")
    assert (alone["equal"], alone["first_difference"], alone["step"]) == (None, None, 0)
    assert alone["turns"][0]["token_ids"] == list(turn.sampled_ids)
    assert alone["turns"][0]["logprobs"] == list(turn.logprobs)
    assert alone["turns"][0]["checkpoint_logprobs"] is None
    # The stages start from the SFT policy, and what the last one exports is another.
    own = replayed(capsys, run, "rl-0-0-0", "--checkpoint", str(run / "export" / "sft"), "--tolerance", "0.2")
    other = replayed(capsys, run, "rl-0-0-0", "--checkpoint", str(run / "export" / "distill"))
    # An untrained model's values fall on a rounding boundary in one token of a thousand: far off, and little of the KL.
    assert (own["equal"], own["first_difference"]) == (True, None)
    assert own["kl"] < 1e-4
    assert other["equal"] is False
    for found in (own, other):
        d = np.array(found["turns"][0]["checkpoint_logprobs"]) - np.array(turn.logprobs)
        assert found["kl"] == pytest.approx(np.mean(np.exp(d) - 1 - d), rel=1e-6, abs=1e-12)  # of doubles
        assert found["largest_difference"] == pytest.approx(np.abs(d).max(), rel=1e-12)
        assert found["tokens"] == len(turn.sampled_ids)
    assert other["kl"] > 1e-4
    assert other["first_difference"]["token"] == np.flatnonzero(np.abs(d) > 5e-4)[0]


def test_a_replay_shows_the_tokens_and_names_the_nearest_of_an_episode_that_is_not_there(finished, capsys):
    _, run = finished
    assert main(["replay", str(run), "distill-0-1-0", "--checkpoint", str(run / "export" / "sft")]) == 0
    shown = capsys.readouterr().out
    assert "  > <|open|>message role=" in shown
    assert "this is the policy that acted" in shown, "a fresh adapter changes nothing"
    error = _refused(capsys, "replay", str(run), "rl-0-0-00")
    assert "nearest: rl-0-0-0" in error


def _refused(capsys, *words: str) -> str:
    """The error of a command line that must be refused, in this process: nothing is started."""
    assert main(words) == 2
    return capsys.readouterr().err


def test_a_used_name_is_refused_with_the_two_ways_on(finished, small, monkeypatch, capsys):
    monkeypatch.chdir(finished[1].parent)
    error = _refused(capsys, "rl", "quickstart", "@", str(small), "--seed", "3", "--out", "quick")
    assert "--resume" in error
    assert "--clean" in error


@pytest.fixture(scope="module")
def again(finished, command, small):
    """The finished run, asked for once more with --resume, when its last measurement is lost."""
    (finished[1] / "evaluations" / "distill.json").unlink()
    return command.json("rl", "quickstart", "@", str(small), "--seed", "3", "--out", "quick", "--resume")


def test_a_finished_run_resumes_to_the_same_figures(finished, again):
    report, _ = finished
    assert [again[f"reward_{key}"] for key in ("before", "rl", "after")] == [
        report[f"reward_{key}"] for key in ("before", "rl", "after")
    ]


def test_rl_refuses_to_start_from_random_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    error = _refused(capsys, "rl", "--out", "random")
    assert "k3rl sft" in error
