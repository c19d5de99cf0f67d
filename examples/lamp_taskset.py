"""A taskset of verifiers with a tool: the reward counts that it was called, and what the call did.

pip install 'qerl[verifiers]'
PYTHONPATH=$PWD/examples qerl train --env verifiers:lamp_taskset --sample.max-tokens 48 --out runs/lamp \
    --task.env-options '{"agent": {"max_turns": 2, "sampling": {"tool_choice": "required"}}}'

Without "sampling" the model may also answer in words; a model that knows how to call tools needs no more.
"""

import verifiers.v1 as vf

__all__ = ["LampTaskset"]


class Lamp(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    def switch(self, is_on: bool) -> str:
        """Switch the lamp on or off."""
        return f"the lamp is {'on' if is_on else 'off'}"


class LampData(vf.TaskData):
    wanted: str


class LampTask(vf.Task[LampData]):
    @classmethod
    def toolsets(cls, config):
        return [Lamp(vf.ToolsetConfig())]

    @vf.reward(weight=0.5)
    async def called(self, trace) -> float:
        return float(len(trace.tool_messages) > 0)

    @vf.reward(weight=0.5)
    async def right(self, trace) -> float:
        return float(
            any(f"the lamp is {self.data.wanted}" in str(each.content) for each in trace.tool_messages)
        )


class LampTaskset(vf.Taskset[LampTask, vf.TasksetConfig]):
    def load(self):
        for number in range(512):
            wanted = "on" if number % 2 else "off"
            data = LampData(prompt=f"Lamp {number}: switch it {wanted}.", wanted=wanted)
            yield LampTask(data, self.config.task)


if __name__ == "__main__":  # verifiers starts this file as the tool's own process
    Lamp.run()
