"""State as JSON and bytes."""
