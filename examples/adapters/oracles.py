"""What is right in each example, for `k3rl env check`: (messages so far, row of the task) -> the next turn."""

from collections import deque

STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def turns_so_far(messages):
    return sum(message["role"] == "assistant" for message in messages)


def frozen_lake(messages, row):
    """The first step of a shortest way over the map that was shown last."""
    lines = [line for line in messages[-1]["content"].splitlines() if line and not set(line) - set("SFHG@")]
    cells = {(y, x): cell for y, line in enumerate(lines) for x, cell in enumerate(line)}
    start = next(place for place, cell in cells.items() if cell == "@")
    waiting, seen = deque([(start, None)]), {start}
    while waiting:
        (y, x), first = waiting.popleft()
        if cells[y, x] == "G":
            return first
        for name, (dy, dx) in STEPS.items():
            place = (y + dy, x + dx)
            if cells.get(place, "H") != "H" and place not in seen:
                seen.add(place)
                waiting.append((place, first or name))
    raise ValueError("there is no way to G")


def hanoi(messages, row):
    """Three discs from A to C."""
    return ("[A C]", "[A B]", "[C B]", "[A C]", "[B A]", "[B C]", "[A C]")[turns_so_far(messages)]


def gsm8k(messages, row):
    """The row knows."""
    return f"#### {row['reward_spec']['ground_truth']}"


def doubling(messages, row):
    """The tool twice, then the number."""
    number = row["index"]
    calls = [number, 2 * number]
    done = turns_so_far(messages)
    return [{"name": "doubler_double", "arguments": {"number": calls[done]}}] if done < 2 else str(4 * number)


def digit(messages, row):
    """The server takes it from the seed."""
    return str(row["seed"] % 10)
