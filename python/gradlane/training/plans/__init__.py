"""Plans that a session follows, and how all ranks come to the same one."""
