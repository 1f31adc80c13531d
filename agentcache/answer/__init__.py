"""The answer: from the text of a completion to its message, and the constraints it is held to. Knows neither storage nor the engine."""
