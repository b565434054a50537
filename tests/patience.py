"""How long tests wait for what has to come: to wait in vain means that it hangs, never that the machine is slow."""

# Below the limit of a whole test in pyproject.toml, so that what hangs is told by the test that waits for it.
PATIENCE_S = 900.0
# For threads behind a test that should end by themselves: those of something that nobody closed never do.
THREAD_PATIENCE_S = 60.0
