"""A search for training loops that gradlane gets wrong: every read of random loops is compared."""
