"""What links carry, measured: streams between ranks, and what follows for each link."""
