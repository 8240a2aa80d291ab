"""One private step, the loop that runs it, and the driver around both."""
