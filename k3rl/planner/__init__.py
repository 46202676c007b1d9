"""Memory, traffic and time of a layout, before it runs: what `k3rl plan` answers from.

inputs.py   Cluster, Workload, Method, Layout: what is asked about       plan.py     Plan: what one layout takes
search.py   the fastest layout, other methods, smallest clusters          report.py   a plan as plain values
shares.py   what falls to one device          memory.py   its bytes       traffic.py  what it sends
work.py     operations and seconds of training       engine.py   memory and time of the engines
optimizer.py  frozen.py    one step's costs, frozen weights that ranks share       live_bytes.py   measures a real run
Not here: what a model costs before it is divided (`k3rl.model.costs`).
"""

from k3rl.planner.frozen import frozen_parts
from k3rl.planner.inputs import (
    GIB,
    GPUS,
    Cluster,
    Efficiency,
    Gpu,
    Layout,
    Method,
    PlanError,
    Workload,
    has_kernels,
)
from k3rl.planner.live_bytes import LiveBytes
from k3rl.planner.memory import learner_memory
from k3rl.planner.optimizer import optimizer_costs
from k3rl.planner.plan import Plan, plan_layout
from k3rl.planner.report import plan_report
from k3rl.planner.search import (
    compare_methods,
    fastest_plan,
    fastest_plan_of_layout,
    memory_savers,
    smallest_clusters,
)
from k3rl.planner.traffic import expert_bytes, gradient_bytes

__all__ = [
    "GIB",
    "GPUS",
    "Cluster",
    "Efficiency",
    "Gpu",
    "Layout",
    "LiveBytes",
    "Method",
    "Plan",
    "PlanError",
    "Workload",
    "compare_methods",
    "expert_bytes",
    "fastest_plan",
    "fastest_plan_of_layout",
    "frozen_parts",
    "gradient_bytes",
    "has_kernels",
    "learner_memory",
    "memory_savers",
    "optimizer_costs",
    "plan_layout",
    "plan_report",
    "smallest_clusters",
]
