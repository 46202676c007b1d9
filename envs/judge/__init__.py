"""Judging what no test can: a model compares the answers of a group in pairs.

endpoint    the judge: any OpenAI-compatible server, our own engine included
shown       judged text between markers that nobody can guess; it is data, whatever it says
verdict     the judge's rubric and scores as JSON of a fixed shape, checked, asked again within limits
tournament  who meets whom, and what the games are worth
rubric      `judged`: an `Environment.grader` made of these; `with_judge`: an environment with the judge of `env.judge`
"""

from k3rl.envs.config import JudgeConfig
from k3rl.envs.judge.endpoint import Endpoint, HTTPEndpoint, JudgeFailed
from k3rl.envs.judge.rubric import JudgeRubric, judged, with_judge

__all__ = ["Endpoint", "HTTPEndpoint", "JudgeConfig", "JudgeFailed", "JudgeRubric", "judged", "with_judge"]
