"""Agent programs of the demo. They know nothing of polar: the openai SDK and the standard library only."""
