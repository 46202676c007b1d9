"""How a weight version gets from the learner to the engines."""
