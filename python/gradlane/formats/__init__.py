"""What the wings hand to each other: profiles, timelines, state, rates, whole files."""
