"""What a session says about a running training."""
