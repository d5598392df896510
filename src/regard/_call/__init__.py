"""From the arguments of a call to an engine: plans, explanations, and the call as an operator."""
