"""How a policy sees and walks Gymnasium's FrozenLake: functions for `observe` and `act`."""

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}


def observe(observation, env):
    """The map with the walker on it."""
    rows = [[cell.decode() for cell in row] for row in env.unwrapped.desc]
    row, column = divmod(int(observation), len(rows[0]))
    rows[row][column] = "@"
    return "\n".join("".join(cells) for cells in rows)


def act(text):
    """The last direction that is named."""
    named = [word for word in text.lower().replace(".", " ").split() if word in MOVES]
    if not named:
        raise ValueError("no direction is named")
    return MOVES[named[-1]]
