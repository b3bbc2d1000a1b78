"""What steps do beside sending gradients and applying their means, one stage a file."""
