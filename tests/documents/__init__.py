"""Every code block of the README and of `docs/` is run, or parsed by what would run it."""
