"""Sessions: start, parts, models, end."""
