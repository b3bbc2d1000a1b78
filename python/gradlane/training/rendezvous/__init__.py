"""The other ranks: finding them, agreeing with them, waiting for them."""
