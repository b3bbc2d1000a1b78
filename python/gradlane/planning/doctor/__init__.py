"""What a machine and a cluster need for a training, checked before one starts."""
