"""Pages of the lab's runs and presets."""
