"""The judge, with the real tools in real sandboxes: oracle, null, every hack, and honest designs beside them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Iterator

import pytest

from k3rl.envs import chip
from k3rl.envs.base import Action, EpisodeContext
from k3rl.envs.chip import flow
from k3rl.envs.chip.reward import FLOOR, Measures, ratio_score, reward, score_parts
from k3rl.envs.chip.tasks import to_task
from k3rl.envs.sandbox import Sandbox, SandboxError, SandboxLimits, SandboxProvider
from k3rl.types import Failed, Invalid, Message, Scored, StopReason, Task

ENVIRONMENT = chip.environment()
ADDER = to_task(chip.LADDER[0], {"width": 8}, "chip/test/adder", 0)
# An honest design that has a likeness of every trick: functions, parameters, ports by name, generate, `@(*)`, words
# in comments, a clock enable for a gated clock, a reset for an initial value, two cycles of latency where three may be.
HONEST = """`timescale 1ns/1ps
`default_nettype none
// initial values come by reset; $display and `ifdef SYNTHESIS are not needed
module half #(parameter W = 4) (input wire [W-1:0] a, input wire [W-1:0] b, input wire c, output wire [W:0] s);
  assign s = a + b + c;
endmodule
module dut(input wire clk, input wire rst, input wire in_valid, input wire [7:0] in_a, input wire [7:0] in_b,
           input wire in_carry, output reg out_valid, output reg [8:0] out_sum);
  localparam W = 1 << $clog2(4);
  function [W-1:0] high(input [7:0] x); high = x[7 -: W]; endfunction
  wire [W:0] low;
  half #(.W(W)) u_low (.a(in_a[W-1:0]), .b(in_b[W-1:0]), .c(in_carry), .s(low));
  reg [W:0] low_q; reg [W-1:0] a_q, b_q; reg valid;
  wire [W:0] top;
  generate
    if (W == 4) begin : g_high
      half u_high(.a(a_q), .b(b_q), .c(low_q[W]), .s(top));
    end
  endgenerate
  reg [8:0] sum;
  always @(*) sum = {top, low_q[W-1:0]};
  always @(posedge clk) begin
    if (in_valid) begin low_q <= low; a_q <= high(in_a); b_q <= high(in_b); end
    valid <= in_valid & ~rst;
    out_valid <= valid & ~rst;
    out_sum <= sum;
  end
endmodule
`default_nettype wire
"""


# Two queues as people write them: modern words with pointers one bit longer than needed, and a shift register.
POINTERS = """module dut #(parameter int W = 8, parameter int D = 4) (
  input logic clk, input logic rst, input logic in_valid, output logic in_ready, input logic [W-1:0] in_data,
  output logic out_valid, input logic out_ready, output logic [W-1:0] out_data);
  localparam int A = $clog2(D);
  typedef enum logic [1:0] {EMPTY, SOME} state_t;
  state_t state;
  logic [W-1:0] mem [D];
  logic [A:0] wp, rp;
  assign in_ready = !(wp[A] != rp[A] && wp[A-1:0] == rp[A-1:0]);
  assign out_data = mem[rp[A-1:0]];
  always_comb unique case (wp == rp)
    1'b1: state = EMPTY;
    default: state = SOME;
  endcase
  assign out_valid = state == SOME;
  always_ff @(posedge clk) begin
    if (rst) begin
      wp <= '0;
      rp <= '0;
    end else begin
      if (in_valid && in_ready) begin mem[wp[A-1:0]] <= in_data; wp <= wp + 1'b1; end
      if (out_valid && out_ready) rp <= rp + 1'b1;
    end
  end
endmodule
"""
SHIFTING = """module dut(input clk, input rst, input in_valid, output in_ready, input [7:0] in_data,
           output out_valid, input out_ready, output [7:0] out_data);
  reg [7:0] s0, s1, s2, s3;
  reg [2:0] n;
  wire push = in_valid & in_ready, pop = out_valid & out_ready;
  assign in_ready = n != 4;
  assign out_valid = n != 0;
  assign out_data = n == 1 ? s0 : n == 2 ? s1 : n == 3 ? s2 : s3;
  always @(posedge clk) begin
    if (push) begin s0 <= in_data; s1 <= s0; s2 <= s1; s3 <= s2; end
    n <= rst ? 0 : n + push - pop;
  end
endmodule
"""


@pytest.fixture(scope="module")
def rubric() -> Iterator[chip.ChipRubric]:
    judge = ENVIRONMENT.grader(workers=2)
    yield judge
    judge.close()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One second of processor time for the text of a design."""
    monkeypatch.setattr(flow, "FRONT", dataclasses.replace(flow.FRONT, cpu_s=1))


def test_the_reference_gets_half_and_doing_nothing_gets_nothing(rubric: chip.ChipRubric) -> None:
    best, nothing = rubric.score_batch([(ADDER, chip.oracle(ADDER)), (ADDER, chip.null(ADDER))])
    assert isinstance(best, Scored)
    assert best.reward == pytest.approx(chip.ORACLE_REWARD, abs=1e-9)  # the same tools on the same text
    assert best.parts["gates"] == best.parts["in_time"] == 1.0
    assert isinstance(nothing, Scored)
    assert nothing.reward == 0.0


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", chip.hacks(ADDER))
def test_no_hack_pays(rubric: chip.ChipRubric, name: str) -> None:
    (report,) = rubric.reports([(ADDER, chip.hacks(ADDER)[name])])
    assert isinstance(report.score, Invalid) or (isinstance(report.score, Scored) and report.score.reward == 0.0), (
        report
    )


def test_hacks_are_caught_where_they_can_be_known(rubric: chip.ChipRubric) -> None:
    hacks = chip.hacks(ADDER)
    wanted = {"late_outputs": "simulation", "unknown_hides": "gates", "unknown_outputs": "simulation"}
    reports = rubric.reports([(ADDER, hacks[name]) for name in wanted])
    assert {name: report.stage for name, report in zip(wanted, reports, strict=True)} == wanted
    (gated,) = rubric.score_batch([(ADDER, hacks["gated_clock"])])
    assert gated == Invalid("derived_clock", gated.evidence)  # type: ignore[union-attr]


def test_an_honest_design_that_looks_like_every_trick_is_scored(rubric: chip.ChipRubric) -> None:
    (report,) = rubric.reports([(ADDER, f"Here it is:\n```verilog\n{HONEST}```\n")])
    assert isinstance(report.score, Scored), report
    assert report.score.reward > FLOOR
    # Twice the stages: shorter paths, more flip-flops, the same rate (one cycle more for the whole stream).
    assert report.score.parts["speed_score"] > 0.5 > report.score.parts["area_score"]
    assert report.score.parts["throughput_score"] == pytest.approx(0.5, abs=0.01)


def test_other_honest_designs_are_scored_by_their_area(rubric: chip.ChipRubric) -> None:
    task = to_task(chip.LADDER[1], {"width": 8, "depth": 4}, "chip/test/fifo", 0)
    pointers, shifting = rubric.score_batch([(task, POINTERS), (task, SHIFTING)])
    assert isinstance(pointers, Scored)
    assert isinstance(shifting, Scored)
    assert shifting.parts["area"] < pointers.parts["area"]
    assert shifting.parts["area_score"] > 0.5
    assert shifting.reward > pointers.reward > FLOOR


def test_a_queue_that_is_too_short_or_turns_words_round_is_worth_nothing(rubric: chip.ChipRubric) -> None:
    task = to_task(chip.LADDER[1], {"width": 8, "depth": 4}, "chip/test/fifo", 0)
    wrong = [SHIFTING.replace("n != 4", "n != 3"), SHIFTING.replace("n == 2 ? s1", "n == 2 ? s0")]
    for report in rubric.reports([(task, text) for text in wrong]):
        assert isinstance(report.score, Scored)
        assert report.score.reward == 0.0
        assert report.stage == "simulation"


def test_an_asynchronous_reset_has_no_gate_and_is_told_so(rubric: chip.ChipRubric) -> None:
    text = HONEST.replace(
        "out_valid <= valid & ~rst;", "end\n  always @(posedge clk or posedge rst) begin\n    if (rst) out_valid <= 0; "
        "else out_valid <= valid;\n  end\n  always @(posedge clk) begin"
    )  # fmt: skip
    (report,) = rubric.reports([(ADDER, text)])
    assert isinstance(report.score, Scored)
    assert report.score.reward == 0.0
    assert "async" in report.message


def test_several_files_are_one_design(rubric: chip.ChipRubric) -> None:
    top, rest = HONEST.index("module dut"), HONEST.index("module half")
    files = {"half.v": HONEST[rest:top], "dut.v": HONEST[top:].replace("`default_nettype wire\n", "")}
    one, two = rubric.score_batch([(ADDER, HONEST), (ADDER, json.dumps({"files": files}))])
    assert isinstance(two, Scored)
    assert isinstance(one, Scored)
    assert two.reward == pytest.approx(one.reward, abs=0.02)  # names differ, so mapping may


def test_the_inference_chip_passes_every_gate(rubric: chip.ChipRubric) -> None:
    task = to_task(chip.LADDER[-1], {"words": 1, "bits": 20}, "chip/test/inference", 0)
    (report,) = rubric.reports([(task, chip.oracle(task))])
    assert isinstance(report.score, Scored), report
    assert report.score.reward == pytest.approx(chip.ORACLE_REWARD, abs=1e-9)
    assert report.score.parts["slack_ns"] >= 0


def test_a_wrong_bit_anywhere_is_worth_nothing(rubric: chip.ChipRubric) -> None:
    wrong = chip.oracle(ADDER).replace("in_a + in_b", "in_a + (in_b & 8'd254)")
    (score,) = rubric.score_batch([(ADDER, wrong)])
    assert isinstance(score, Scored)
    assert score.reward == 0.0
    assert 0 <= score.parts["simulation"] < 1


class _Broken(SandboxProvider):
    """A machine on which no sandbox can be made."""

    name, safe = "broken", True

    def check(self) -> None:
        pass

    async def create(self, limits: SandboxLimits | None = None) -> Sandbox:
        raise SandboxError("no room")

    def start_program_server(self):  # type: ignore[no-untyped-def]
        raise SandboxError("no room")


def test_a_broken_machine_is_failed_and_never_zero() -> None:
    with contextlib.closing(chip.ChipRubric(_Broken())) as judge:
        scores = judge.score_batch([(ADDER, chip.oracle(ADDER)), (ADDER, "$finish;"), (ADDER, "")])
    assert isinstance(scores[0], Failed)
    assert isinstance(scores[1], Invalid)  # what needs no tool is judged all the same
    assert scores[2] == Scored(0.0, {"rules": 0.0})


def test_a_broken_tool_is_failed_and_never_the_designs_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_MAPPING", "+no_such_command")
    with contextlib.closing(ENVIRONMENT.grader()) as judge:
        (score,) = judge.score_batch([(ADDER, HONEST)])
    assert isinstance(score, Failed)
    assert "reference" in score.reason


def test_practice_judges_by_other_transactions_than_the_end(rubric: chip.ChipRubric) -> None:
    task = chip.practice(ADDER)
    assert task.hidden != ADDER.hidden
    (score,) = rubric.score_batch([(task, chip.null(task))])
    assert isinstance(score, Scored)


def test_a_missing_tool_names_the_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow.shutil, "which", lambda command, path: None if command == "sta" else f"/usr/bin/{command}")
    with pytest.raises(
        chip.ToolsMissing, match=r"opensta; run `sudo apt-get install .*iverilog verilator yosys opensta`"
    ):
        ENVIRONMENT.grader()


def test_a_task_without_its_hidden_part_is_refused(rubric: chip.ChipRubric) -> None:
    with pytest.raises(ValueError, match="hidden"):
        rubric.score_batch([(ADDER.public(), "x")])


def test_the_judge_works_inside_a_running_loop(rubric: chip.ChipRubric) -> None:
    async def inside() -> list[object]:
        return list(rubric.score_batch([(ADDER, "")]))

    assert asyncio.run(inside()) == [Scored(0.0, {"rules": 0.0})]


def test_an_episode_is_one_answer() -> None:
    async def play(action: Action) -> object:
        env = ENVIRONMENT.make_env()
        observation = await env.reset(ADDER.public(), EpisodeContext())
        assert observation.messages == ADDER.messages
        return await env.step(action)

    done = asyncio.run(play(Action(Message("assistant", "module dut; endmodule"))))
    assert (done.answer, done.stop_reason) == ("module dut; endmodule", StopReason.COMPLETED)  # type: ignore[attr-defined]


BASE = Measures(area=100.0, slack_ns=0.2, cycles_per_item=2.0)


def test_ratios_are_scored_on_a_log_scale_and_clipped() -> None:
    assert [ratio_score(ratio) for ratio in (1, 2, 0.5, 4, 0.25, 100, 0.01)] == [0.5, 0.75, 0.25, 1, 0, 1, 0]


def test_parts_follow_area_slack_and_throughput() -> None:
    parts = score_parts(Measures(50.0, 0.6, 1.0), BASE, 1.0)
    assert parts == pytest.approx({"area": 0.75, "speed": 0.75, "throughput": 0.75})
    assert reward(parts) == pytest.approx(0.75)


def test_a_missed_target_costs_speed_and_throughput() -> None:
    parts = score_parts(dataclasses.replace(BASE, slack_ns=-1.0), BASE, 1.0)
    assert parts == pytest.approx({"area": 0.5, "speed": 0.0, "throughput": 0.25})


def test_the_worst_right_design_is_worth_more_than_a_wrong_one() -> None:
    parts = score_parts(Measures(1e6, -9.0, 1e6), BASE, 1.0)
    assert reward(parts) == FLOOR > 0


def test_oracle_null_and_hacks_exist_for_every_rung() -> None:
    for problem in chip.LADDER:
        task: Task = to_task(problem, problem.train[0], "chip/test/x", 0)
        texts = {"oracle": chip.oracle(task), "null": chip.null(task), **chip.hacks(task)}
        assert len(set(texts.values())) == len(texts)
