"""A taskset of verifiers (its v1 interface) with a tool: a number is to be doubled twice."""

import verifiers.v1 as vf


class DoublingData(vf.TaskData):
    answer: int


class Doubler(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def double(self, number: int) -> int:
        """Twice a number."""
        return 2 * number


class Doubling(vf.Task[DoublingData]):
    @classmethod
    def toolsets(cls, config):
        return [Doubler(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == str(self.data.answer))


class DoublingTaskset(vf.Taskset[Doubling, vf.TasksetConfig]):
    def load(self):
        for number in range(16):
            prompt = f"Double {number} twice with the tool, then answer with the number alone."
            yield Doubling(DoublingData(prompt=prompt, answer=4 * number), self.config.task)


__all__ = ["DoublingTaskset"]

if __name__ == "__main__":
    Doubler.run()
