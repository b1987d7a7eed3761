"""One pattern a file; see :mod:`inductor_grpo.pattern` for what a pattern is.  A new file is found by itself."""
