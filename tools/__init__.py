"""Command-line tools: ``python -m inductor_grpo.tools.<name>``."""
