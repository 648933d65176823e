"""Inference engines: the vLLM server, its worker extension and the models that the demo serves."""
